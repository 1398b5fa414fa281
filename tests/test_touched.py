"""Which tests a change touches."""

import pathlib
import subprocess

import pytest

from tests import touched

FILES = {
    "fedjax_sim/__init__.py": "",
    "fedjax_sim/rules/__init__.py": "from fedjax_sim.rules.krum import krum\nfrom fedjax_sim.rules.mean import mean\n",
    "fedjax_sim/rules/krum.py": "from fedjax_sim.distance import pairs\n\ndef krum(): pairs()\n",
    "fedjax_sim/rules/mean.py": "def mean(): pass\n",
    "fedjax_sim/distance.py": "def pairs(): pass\n",
    "fedjax_sim/config/registry.py": "",
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/rules/conftest.py": "from tests import problems\n",
    "tests/problems.py": "",
    "tests/rules/test_krum.py": "from fedjax_sim import rules\n\nrules.krum()\n",
    "tests/rules/test_mean.py": "from fedjax_sim.rules import mean\n",
    "tests/test_every.py": "from fedjax_sim import rules\n\nprint(rules)\n",
    "tests/test_config.py": "import fedjax_sim.config.registry\n\nTEXT = 'name = \"krum\"'\n",
    "tests/test_process.py": "COMMAND = ['-m', 'fedjax_sim.distance']\n",
    "tests/test_pages.py": "FOLDER = 'docs'\n",
}


@pytest.fixture
def checkout(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_imports_lead_to_tests(checkout):
    """Faults: a subpackage that leads to all of its modules; one that leads to none; a name in a config, a process, a
    conftest.py or a folder of pages that nobody follows."""
    known = touched.sources(checkout)

    def tests(*names):
        return {path.stem for path in touched.reaching(map(pathlib.Path, names), known)}

    through_krum = {"test_krum", "test_every", "test_config"}
    assert tests("fedjax_sim/rules/krum.py") == through_krum
    assert tests("fedjax_sim/distance.py") == through_krum | {"test_process"}
    assert tests("fedjax_sim/rules/mean.py") == {"test_mean", "test_every"}
    assert tests("fedjax_sim/rules/__init__.py") == {"test_krum", "test_mean", "test_every"}
    assert tests("tests/problems.py") == {"test_krum", "test_mean"}
    assert len(tests("tests/conftest.py")) == 6
    assert tests("docs/faq.md") == {"test_pages"}
    assert tests("tests/test_every.py") == {"test_every"}


@pytest.mark.full  # by default a small checkout is
def test_this_package_is_understood():
    """Fault: a way to import that the package has and the tool does not know."""
    known = touched.sources()

    def tests(name):
        return set(map(str, touched.reaching([pathlib.Path(name)], known)))

    assert "tests/theory/test_consensus.py" in tests("fedjax_sim/theory/consensus.py")
    rule = tests("fedjax_sim/aggregation/robust/distance.py")
    assert {"tests/aggregation/robust/test_distance.py", "tests/laws/test_members.py"} <= rule
    assert "tests/models/test_layers.py" not in rule and len(rule) < len(tests("fedjax_sim/engine/fold.py")) / 2


def test_a_change_is_of_commits_and_of_the_working_tree(checkout):
    """Fault: what is not committed, or what the other branch changed meanwhile."""

    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=checkout, check=True, capture_output=True)

    git("init", "-b", "main")
    git("add", ".")
    git("commit", "-m", "start")
    git("checkout", "-b", "other")
    (checkout / "committed.py").write_text("")
    git("add", ".")
    git("commit", "-m", "one")
    git("checkout", "main")
    (checkout / "of_main.py").write_text("")
    git("add", ".")
    git("commit", "-m", "two")
    git("checkout", "other")
    (checkout / "tests/problems.py").write_text("x = 1\n")
    (checkout / "new.md").write_text("")
    assert set(map(str, touched.changed("main", checkout))) == {"committed.py", "tests/problems.py", "new.md"}
