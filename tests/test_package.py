"""What a wheel holds and says of itself."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

import fedjax_sim
from fedjax_sim.config.document import load

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
NEED_DATA = ("cifar_resnet", "cora", "heart_disease", "vertical_hospitals")
NEED_DATA += ("keyboard", "shakespeare", "shakespeare_adapters", "shakespeare_transformer")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILT = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "fedjax_sim", "experiments")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel that is built from a source distribution of the files that a checkout has."""
    pytest.importorskip("setuptools", minversion="77")  # the build needs it, and installs it by itself
    folder = tmp_path_factory.mktemp("build")
    for name in BUILT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    build(folder, "sdist")
    with tarfile.open(next((folder / "dist").glob("*.tar.gz"))) as archive:
        archive.extractall(folder / "source", filter="data")
    (source,) = (folder / "source").iterdir()
    build(source, "wheel")
    return next((source / "dist").glob("*.whl"))


def build(folder: pathlib.Path, kind: str) -> None:
    """Builds a source distribution or a wheel of a folder, as pip and `python -m build` do."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_in_the_wheel(built):
    """Fault: an experiment or py.typed that an installed package lacks, benchmarks that it has as packages, and a file
    of the package that a source distribution loses."""
    names = set(zipfile.ZipFile(built).namelist())
    package = {path for path in names if path.startswith("fedjax_sim/")}
    configs = {path.relative_to(EXPERIMENTS).as_posix() for path in EXPERIMENTS.rglob("*.toml")}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fedjax_sim").rglob("*.py")}
    examples = {f"fedjax_sim/examples/{config}" for config in configs}
    assert package == examples | sources | {"fedjax_sim/py.typed"} and len(configs) > 10
    assert {name.partition("/")[0] for name in names} == {"fedjax_sim", built.name.partition("-py3")[0] + ".dist-info"}


def test_an_installed_package_has_its_examples(built, tmp_path):
    """Fault: README's `run quickstart` that works in a checkout only."""
    zipfile.ZipFile(built).extractall(tmp_path / "installed")
    code = "from fedjax_sim.config import read; print(read.EXAMPLES_FOLDER); read.read_document('quickstart')"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / 'installed' / 'fedjax_sim' / 'examples'}\n", done.stderr


def test_no_link_is_in_the_repository():
    """Fault: a link, which a checkout on Windows makes a file of one line."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git, or no checkout")
    assert listed.stdout and not [line for line in listed.stdout.splitlines() if line.startswith("120000")]


def test_what_is_installed_is_used():
    """Fault: a dependency that every user installs and no module imports."""
    text = "".join(path.read_text() for path in (ROOT / "fedjax_sim").rglob("*.py"))
    modules = {"scikit-learn": "sklearn", "dp-accounting": "dp_accounting"}
    for dependency in PROJECT["project"]["dependencies"]:
        name = re.split("[>=]", dependency)[0]
        assert re.search(rf"\b(import|from) {modules.get(name, name)}\b", text) or name == "jaxlib", name


def test_slow_imports_wait_until_they_are_used():
    """Fault: a run without noise that waits a second for what accounts for noise, or draws; devices that are chosen
    before a user could choose them."""
    slow = {"dp_accounting", "matplotlib", "scipy.integrate", "scipy.optimize", "scipy.signal", "scipy.stats"}
    needed_by_graphs = {"scipy.sparse"}
    for packages, unused in (
        (("experiment", "instruments", "privacy", "report.page", "report.plots", "running", "theory"), slow),
        (("algorithms", "config.build", "network", "running"), slow | needed_by_graphs),
    ):
        imported = ", ".join(f"fedjax_sim.{x}" for x in packages)
        code = f"import sys, {imported}; from jax._src.xla_bridge import _backends\n"
        code += f"print(sorted({unused} & set(sys.modules)), _backends)"
        found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert found.stdout == "[] {}\n", found.stdout + found.stderr


def test_examples_have_names():
    """Fault: README's `run quickstart` that works in a checkout only."""
    for path in EXPERIMENTS.glob("*.toml"):
        needed = ["data.directory=somewhere"] if path.stem in NEED_DATA else []
        assert load(path.stem, needed) == load(path, needed)


def test_one_version():
    """Fault: two places that name the version, of which one is forgotten."""
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "fedjax_sim.__version__"}
    assert fedjax_sim.__version__.count(".") == 2 and "version" not in (ROOT / "CITATION.cff").read_text().split()
