"""Names from data, configs and modules that would control a terminal or a browser: every command shows them escaped."""

import json
import re
import sys

import pytest

from fedjax_sim.command import app
from fedjax_sim.config import registry
from fedjax_sim.config.toml import inline

pytestmark = pytest.mark.optimised(False)  # words

HOSTILE = "\x1b[2J\x9b31m\x07\x7f\u202eevil\u2066\u200b[red]x[/]é"
SHOWN = "\\x1b[2J\\x9b31m\\x07\\x7f\\u202eevil\\u2066\\u200b[red]x[/]é"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")
MODULE = '''"""\x1b[2J of a user."""
from fedjax_sim import types

def zz_own(*, words: str = "\\x1b[31m\\u202e") -> types.Sampler:
    """Draws \x1b[2J\u202e clients."""
    raise ValueError(f"\\x1b[2J {words}")
'''


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """Each test in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDJAX_SIM_CACHE", "off")
    yield
    registry.admit([])


@pytest.fixture
def called(monkeypatch, capfd):
    """Returns a function that calls the command line; it checks what it prints, and returns (exit code, output)."""

    def call(*arguments, code=0):
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["fedjax-sim", *map(str, arguments)])
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        with pytest.raises(SystemExit) as ended:
            app.main()
        out, err = capfd.readouterr()
        assert not RAW.search(out + err), repr(out + err)
        assert (ended.value.code or 0) == code, out + err
        return out + err

    return call


@pytest.fixture
def config(tmp_path):
    """A config over a table whose header, classes and clients are hostile."""
    rows = [f"client {i % 4}{HOSTILE},{i},{'yes' if i % 3 else 'no'}{HOSTILE}" for i in range(48)]
    (tmp_path / f"x{HOSTILE.replace('/', '')}.csv").write_text(
        "\n".join([f"who{HOSTILE},width{HOSTILE},kind{HOSTILE}", *rows]), encoding="utf-8"
    )
    path = tmp_path / "hostile.toml"
    options = {"name": "table", "file": f"x{HOSTILE.replace('/', '')}.csv", "client": f"who{HOSTILE}"}
    options |= {"label": f"kind{HOSTILE}", "task": "binary"}
    path.write_text(
        "\n".join(["[data]", *(f"{name} = {inline(value)}" for name, value in options.items())])
        + '\n[model]\nname = "logistic"\n[sampler]\ncohort_size = 2\n[run]\nrounds = 2\nevaluate_every = 2\n',
        encoding="utf-8",
    )
    return path


@pytest.mark.pictures("labels")  # the figure with names from the data
def test_no_command_shows_it_raw(config, called, tmp_path):
    """Fault: any command that prints, or writes on a page or a table, a control character of a name from outside."""
    called("data", config)
    assert not RAW.search(config.read_text())
    out = tmp_path / f"run{HOSTILE.replace('/', '')}"
    for seed in (0, 1):
        folder = out.with_name(f"{out.name}{seed}")
        printed = called("run", config, "--set", f"seed={seed}", "--out", folder)
        assert SHOWN.replace("/", "") in printed
        assert not RAW.search((folder / "report.html").read_text(encoding="utf-8"))
        assert not RAW.search((folder / "config.toml").read_text(encoding="utf-8"))
    first, second = (out.with_name(f"{out.name}{seed}") for seed in (0, 1))
    page = (first / "report.html").read_text(encoding="utf-8")
    assert SHOWN.replace("&", "&amp;") in page
    assert "no" + HOSTILE in json.loads((first / "population.json").read_text())["label_names"]  # the data's own name
    called("show", first)
    called("report", first)
    for form in ("terminal", "csv", "markdown", "latex"):
        called("compare", first, second, "--format", form)
    called("compare", first, second, "--out", tmp_path / "compared.html")
    assert not RAW.search((tmp_path / "compared.html").read_text(encoding="utf-8"))


def test_refusals_show_it_escaped(config, called, tmp_path):
    """Fault: an error for a hostile value, name, path or folder with its control characters."""
    h = HOSTILE
    for setting in (f"run.rounds={h}", f"run.{h}=1", f"data.label={h}", f"model.name={h}", f"{h}", f"data.file={h}"):
        called("run", config, "--set", setting, code=2)
    assert "evil" in called("data", config, "--set", f"data.client={h}", code=2)
    for command in ("run", "data", "plan", "account", "sweep", "study", "init", "list", "show", "report", "export"):
        called(command, h, *(["a.npz"] if command == "export" else []), code=2)
    called("run", config, f"--{h}", code=2)
    called(h, code=2)
    called("compare", h, h, code=2)
    called("list", "--with", h, code=2)
    called("account", config, code=2)
    # A table whose refusal quotes a cell, and one whose header is refused.
    rows = "who,kind,x\n" + 9 * "a,no,1\nb,yes,2\n" + f"b,yes,{h}\n"
    (tmp_path / "bad.csv").write_text(rows, encoding="utf-8")
    sets = [word for pair in ("file=bad.csv", "client=who", "label=kind") for word in ("--set", f"data.{pair}")]
    assert "bad.csv:20" in called("data", config, *sets, code=2)
    (tmp_path / "bad.csv").write_text(f"who{h},who{h}\na,no\n", encoding="utf-8")
    called("data", config, *sets, code=2)
    (tmp_path / "bad.toml").write_text(f'a = "\\u001b[2J\\u202e"\n[run]\n"\\u009b{h[-1]}" = 1\n', encoding="utf-8")
    called("run", "bad.toml", code=2)
    (tmp_path / "bad.toml").write_bytes(b"a = \x1b[2J\n")
    called("run", "bad.toml", code=2)


def test_own_modules_and_bugs(called, tmp_path, config):
    """Faults: a module's words in `list`; the traceback of an error of its own."""
    (tmp_path / "zz_hostile.py").write_text(MODULE, encoding="utf-8")
    assert "\\u202e clients" in called("list", "--with", "zz_hostile")
    called("list", "zz_own", "--with", "zz_hostile")
    called("list", "--all", "--with", "zz_hostile")
    sets = ["--with", "zz_hostile", "--unset", "sampler", "--set", "sampler.name=zz_own"]
    assert "Traceback" in called("run", config, *sets, code=1)


@pytest.mark.full
def test_a_plan(config, called):
    """Fault: a forecast with a control character of a name from outside."""
    called("plan", config)


@pytest.mark.full
@pytest.mark.pictures
def test_a_sweep(config, called, tmp_path):
    """Fault: a value of a grid that reaches the table of a sweep raw."""
    # The label's name is hostile, and so is the value of the grid.
    grid = f"sweep.grid.data.label=[{inline('kind' + HOSTILE)}]"
    called("sweep", config, "--set", "sweep.seeds=1", "--set", grid, "--out", tmp_path / "sweep")
    for path in (tmp_path / "sweep").glob("*.*"):
        if path.suffix in (".csv", ".html", ".svg", ".tex", ".toml"):
            assert not RAW.search(path.read_text(encoding="utf-8")), path
