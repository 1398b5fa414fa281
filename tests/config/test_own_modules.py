"""The digests of a user's own modules: every file that can change a run counts, and no other."""

import sys

import pytest

from fedjax_sim.config.own_modules import digests_of_modules

FILES = {
    "rules_a.py": "import os\nimport numpy\nfrom tools_a.deep import inner\n\ndef f():\n    import late_a\n",
    "tools_a/__init__.py": "",
    "tools_a/deep/__init__.py": "from . import inner\nfrom ..side import thing\n",
    "tools_a/deep/inner.py": "import rules_a\nimport nowhere_a\n",
    "tools_a/side.py": "thing = 1\nimport importlib\nimportlib.import_module('called_a')\n__import__('other_a')\n",
    "tools_a/near.py": "",
    "called_a.py": "from importlib import import_module\nimport_module('.near', 'tools_a')\nimport_module(__name__)\n",
    "other_a.py": "",
    "late_a.py": "def f(:\n",
    "unused_a.py": "",
    "venv/site-packages/installed_a.py": "import unused_a\n",
}
COUNTED = ["called_a", "late_a", "other_a", "rules_a", "tools_a", "tools_a.deep", "tools_a.deep.inner", "tools_a.near"]
COUNTED += ["tools_a.side"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for place in (tmp_path, tmp_path / "venv" / "site-packages"):
        monkeypatch.syspath_prepend(place)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0].endswith("_a")]:
        del sys.modules[name]


def test_every_import_counts(folder):
    """Fault: a module behind an import, a relative import, a package or a function that may change unnoticed; a module
    that nobody imports, that Python has, or that is installed, which forbids a run to go on."""
    (folder / "rules_a.py").write_text(FILES["rules_a.py"] + "import installed_a\n")
    before = digests_of_modules(["rules_a"])
    assert list(before) == COUNTED
    for name, text in FILES.items():
        (folder / name).write_text(text + "# edited\n")
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        after = digests_of_modules(["rules_a"])
        changed = [key for key in before if before[key] != after.get(key)]
        assert changed == [module] * (module in COUNTED), name
        before = after if name != "rules_a.py" else digests_of_modules(["rules_a"])


def test_a_named_module_counts_wherever_it_is(folder):
    """Fault: a module of the user's that is installed, and is edited there."""
    assert list(digests_of_modules(["installed_a"])) == ["installed_a", "unused_a"]
    assert digests_of_modules(["nowhere_a"]) == digests_of_modules([]) == {}
