"""What `python -m tests.part` says of a part, and which tests it runs."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from tests import part
from tests.laws import cases
from tests.laws.row import Row


def test_what_a_new_part_lacks(monkeypatch):
    """Faults: a part without a row, without guarantees or without a test of its own, of which nothing is said."""
    home = SimpleNamespace(unheard_of=lambda: None)
    monkeypatch.setitem(cases.SUBPACKAGES, "transform", home)
    words = [line.split()[:2] for line in part.lacking("unheard_of", "transform")]
    assert words == [["a", "row:"], ["`Guarantees:`", "in"], ["a", "test"]]
    monkeypatch.setitem(cases.CASES["transform"], "unheard_of", Row(lambda: None))
    home.unheard_of.__doc__ = "Nothing.\n\nGuarantees: none."
    assert len(list(part.lacking("unheard_of", "transform"))) == 1


def test_words_are_no_test_of_a_part(tmp_path):
    """Faults: a name in a comment or a text, or a longer one, that passes for a test of the part."""
    path = tmp_path / "test_rule.py"
    for line, is_use in {
        "x = aggregation.krum(1)": True,
        "from fedjax_sim.aggregation import krum": True,
        "x = krum": True,
        "x = 'krum'  # as krum does": False,
        "x = multi_krum(1)": False,
        "x = rule(krum=1)": False,
    }.items():
        path.write_text(line, encoding="utf-8")
        assert part.uses(path, "krum") == is_use, line


def test_the_packages_own_parts_lack_nothing():
    """Catches a check that finds fault with every part."""
    for name, subpackage in (("krum", "aggregation"), ("top_k", "transform"), ("scaffold", "algorithms")):
        assert subpackage in part.homes(name) and not list(part.lacking(name, subpackage))
    assert part.homes("work") == [] == part.homes("unheard_of")


def test_a_name_that_is_no_part(capsys):
    """Fault: a typing error that passes for a part without a failing law."""
    assert part.main(["top_q"]) == 2
    assert "got 'top_q'. Did you mean 'top_k'?" in capsys.readouterr().out


def test_tests_of_one_part():
    """Faults: a test of another part, one whose name only begins alike, one without parameters; a law of every row that
    is left out, with parameters or without, and one of several parts at once."""

    def item(marks=(), **params):
        given = {"callspec": SimpleNamespace(params=params)} if params else {}  # as pytest leaves it out
        return SimpleNamespace(get_closest_marker=lambda name: name if name in marks else None, **given)

    every = [item(marks=["every_row"], subpackage="server"), item(marks=["every_row"])]
    about = [item(name="krum"), item(kind="aggregation", name="krum"), item(names=("mean", "krum")), *every]
    others = [
        item(name="multi-krum"),
        item(kind="aggregation", name="mean"),
        item(number=3),
        item(),
        item(marks=["full"]),
    ]
    found, gone = [*others, *about], []
    plugin = part.OnePart("krum")
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: gone.extend(items)))
    steps = plugin.pytest_collection_modifyitems(config, found)
    next(steps)
    found.remove(about[1])  # as pytest takes out those that wait
    with pytest.raises(StopIteration):
        next(steps)
    assert (found, gone) == ([about[0], *about[2:]], others) and (plugin.known, plugin.kept) == (3, 2)


# Files outside of tests/laws that look rows up, and are no laws: they choose the rows by name.
CHOSEN = {
    "algorithms/asynchronous/test_asynchronous.py",
    "oracles/test_resume.py",
    "running/test_killed_rows.py",
    "test_compilation.py",
    "test_part.py",
    "test_program_size.py",
}


def reads_rows(tree: ast.AST) -> bool:
    """Whether a file looks rows up in the tables of the laws, or asks for the names of some rows by a fact."""
    wanted = {f"cases.{name}" for name in ("CASES", "named", "compiled_rows", "traced_rows", "members", "functions")}
    return any(ast.unparse(x) in wanted for x in ast.walk(tree) if isinstance(x, ast.Attribute))


def test_every_law_outside_of_the_folder_is_there():
    """Catches a file that was moved or is new, and whose laws are left out without a word."""
    files = [path for path in part.FOLDER.rglob("test_*.py") if "laws" not in path.relative_to(part.FOLDER).parts]
    texts = {path.relative_to(part.FOLDER).as_posix(): path.read_text(encoding="utf-8") for path in files}
    read = {name for name, text in texts.items() if "cases." in text and reads_rows(ast.parse(text))}
    by_config = {"population/datasets/test_industrial.py"}  # the rules that a config can name
    listed = {path for paths in part.ELSEWHERE.values() for path in paths}
    assert read - CHOSEN == listed - by_config and CHOSEN <= read
    assert listed <= texts.keys()


@pytest.fixture
def called(monkeypatch):
    """The arguments of each call of pytest, which runs nothing and returns `status`."""
    made = SimpleNamespace(arguments=[], status=0)

    def record(arguments, plugins):
        (made.plugin,) = plugins
        made.plugin.known, made.plugin.kept = 5, 3
        made.arguments.append(arguments)
        return pytest.ExitCode(made.status)

    monkeypatch.setattr(part.pytest, "main", record)
    return made


def test_what_the_command_runs(called, capsys):
    """Faults: rows that wait for `--full` in the short run, options or files that are lost, tests of another part."""
    assert part.main(["top_k", "-x"]) == 0 and part.main(["top_k", "--full"]) == 0
    short, full = called.arguments
    files = [str(path) for path in part.files(["transform"])]
    assert short == ["-q", "-x", *files] and full == ["-q", "-m", "", *files]
    assert str(part.FOLDER / "config/test_document.py") in files and len(files) > 30
    assert str(part.FOLDER / "command/test_app.py") not in files
    assert called.plugin.name == "top_k"
    assert capsys.readouterr().out.count("3 tests have top_k; 2 more with --full") == 2


def test_a_failure_is_told(called, monkeypatch, capsys):
    """Faults: a part without a row, or a law that fails, and a command that returns 0."""
    called.status = 1
    assert part.main(["top_k"]) == 1
    called.status = 0
    # Of two parts of this name, one has no row.
    monkeypatch.delitem(cases.CASES["client"], "scaffold")
    assert part.main(["scaffold"]) == 1 and len(called.arguments) == 2
    assert 'client.scaffold lacks a row: add "scaffold"' in capsys.readouterr().out
    monkeypatch.delitem(cases.CASES["algorithms"], "scaffold")
    assert part.main(["scaffold"]) == 1
    assert len(called.arguments) == 2, "there is nothing to run"
