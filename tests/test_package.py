"""What a wheel holds and says of itself, read from pyproject.toml: no wheel is built."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import tomllib

import fedjax_sim
from fedjax_sim.config.document import load

ROOT = pathlib.Path(__file__).resolve().parents[1]
EXPERIMENTS = ROOT / "experiments"
NEED_DATA = ("cora", "heart_disease", "vertical_hospitals")
NEED_DATA += ("keyboard", "shakespeare", "shakespeare_adapters", "shakespeare_transformer")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_examples_and_types_are_in_the_wheel():
    """Fault: an experiment or py.typed that an installed package lacks, or benchmarks that it has as packages."""
    tools = PROJECT["tool"]["setuptools"]
    found = [path for glob in tools["package-data"]["fedjax_sim"] for path in (ROOT / "fedjax_sim").glob(glob)]
    configs = {path.relative_to(EXPERIMENTS) for path in EXPERIMENTS.rglob("*.toml")}
    examples = {path.relative_to(ROOT / "fedjax_sim/examples") for path in found if path.suffix == ".toml"}
    assert examples == configs and len(configs) > 10
    assert ROOT / "fedjax_sim/py.typed" in found
    assert tools["packages"]["find"]["namespaces"] is False and not (EXPERIMENTS / "__init__.py").exists()


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
