"""The report shows what happened, runs nothing, refers to nothing outside itself, and survives any run's files."""

import builtins
import io
import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from fedjax_sim.report import axes, html, plots, sections
from fedjax_sim.report.headline import tiles
from fedjax_sim.report.page import write_report
from fedjax_sim.report.readings import labels_in_words, learning_in_words, sizes_in_words
from tests import pictures
from tests.laws import cases
from tests.refusals import refused

HOSTILE = "</pre></title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&$\\frac{x$"


def fake_run(folder: Path, rounds: int = 100, *, seed: int = 0, clean: bool = False) -> Path:
    """A run folder as the runner writes it: a plausible federated run on ten digits."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    records, timing, seconds = [], [], 0.0
    for r in range(1, rounds + 1):
        loss = 2.2 * math.exp(-r / 30) + 0.25
        reported = 100 if clean else int(100 - rng.poisson(6))
        bad = {} if clean else {"dropped": int(rng.random() < 0.05) * int(rng.integers(1, 4)), "skipped": int(r == 63)}
        record = {
            "round": r,
            "local_loss": loss + 0.08 * rng.normal(),
            "local_accuracy": 0.93 - 0.8 * math.exp(-r / 25) + 0.015 * rng.normal(),
            "clients_invited": 100,
            "clients_reported": reported,
            "dropped_clients": bad.get("dropped", 0),
            "skipped_rounds": bad.get("skipped", 0),
            "uplink_bytes": reported * 31_400,
            "downlink_bytes": 100 * 31_400,
            "update_norm": 1.0 / r,
        }
        if r % 5 == 0 or r == rounds:
            center = 0.91 - 0.8 * math.exp(-r / 25)
            spread = np.clip(center + np.array([-0.22, -0.08, 0.01, 0.05, 0.08]) * (1.2 - center), 0, 1)
            record |= {"test_loss": loss + 0.03, "test_accuracy": center + 0.005}
            record |= {"held_out_loss": loss + 0.1, "held_out_accuracy": center - 0.01}
            record |= {"held_out_accuracy_quantiles": spread.tolist()}
            record |= {"held_out_loss_quantiles": (loss + np.array([-0.2, -0.1, 0.05, 0.25, 0.7])).tolist()}
        seconds += 0.021 + 0.002 * rng.random()
        records.append(record)
        timing.append({"round": r, "seconds": seconds, "elapsed_seconds": seconds + 2.5})
    write_lines(folder / "metrics.jsonl", records)
    write_lines(folder / "timing.jsonl", timing)
    trained = sum(record["clients_reported"] + record["dropped_clients"] for record in records)
    summary = {
        "name": "digits, FedAvg, Dirichlet 0.3",
        "finished": True,
        "test_accuracy": records[-1]["test_accuracy"],
        "test_loss": records[-1]["test_loss"],
        "rounds": rounds,
        "client_visits": trained,
        "rounds_seconds": seconds,
        "compile_seconds": 2.47,
        "clients_per_second": trained / seconds,
        "peak_memory_bytes": 412_000_000,
        "uplink_bytes": sum(record["uplink_bytes"] for record in records),
        "downlink_bytes": sum(record["downlink_bytes"] for record in records),
        "skipped_rounds": sum(record["skipped_rounds"] for record in records),
        "dropped_clients": sum(record["dropped_clients"] for record in records),
        "privacy": {"epsilon": 2.31, "explanation": "epsilon 2.31 at delta 1e-06.\nThe server is trusted."},
    }
    env = {
        "command": "fedjax-sim run --config config.toml --set algorithm.server.learning_rate=1.0 --seed 0",
        "versions": {"fedjax_sim": "0.1.0", "jax": "0.10.2", "numpy": "2.3.1"},
        "python": "3.11.2",
        "platform": "Linux x86_64",
        "devices": ["cpu:0", "cpu:1"],
        "cpu_count": 2,
    }
    counts = rng.multinomial(1, np.ones(10) / 10, size=24) * 0
    for i in range(24):
        counts[i] = rng.multinomial(rng.integers(20, 160), rng.dirichlet(0.3 * np.ones(10)))
    population = {
        "name": "digits",
        "num_clients": 1000,
        "num_examples_total": 71_234,
        "examples_quantiles": {"min": 4, "q25": 41, "median": 68, "q75": 97, "max": 160},
        "examples_histogram": {"edges": [3.5, 42.5, 81.5, 120.5, 160.5], "clients": [270, 330, 300, 100]},
        "label_names": [str(i) for i in range(10)],
        "label_counts": counts.tolist(),
        "client_ids": sorted(rng.choice(1000, 24, replace=False).tolist()),
    }
    for name, value in (("summary", summary), ("env", env), ("population", population)):
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "config.toml").write_text(
        'name = "digits, FedAvg, Dirichlet 0.3"\nseed = 0\nrounds = 100\n\n[population]\nname = "digits"\n'
        'num_clients = 1000\n\n[population.partition]\nname = "dirichlet"\nconcentration = 0.3\n\n'
        '[sampling]\nname = "uniform"\nnum_clients = 100\n\n[client]\nname = "local_sgd"\nlearning_rate = 0.1\n'
    )
    return folder


def write_lines(path: Path, records: list[dict]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def edit_records(folder: Path, change) -> None:
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    write_lines(path, [change(record) or record for record in records])


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


class Page(HTMLParser):
    """Tags, attributes and ids of a page, and whether its tags close in order."""

    VOID = frozenset({"meta", "br", "img", "link", "hr", "input"})

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.open, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def rendered(folder: Path) -> tuple[Page, str]:
    text = write_report(folder).read_text(encoding="utf-8")
    return Page(text), text


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return rendered(fake_run(tmp_path_factory.mktemp("run") / "whole"))


def check_safe(page: Page) -> None:
    assert not {"script", "img", "link", "iframe", "object", "embed", "foreignobject", "base", "a"} & set(page.tags)
    for name, value in page.attributes:
        assert not name.startswith("on") and name != "src", (name, value)
        assert "href" not in name or value.startswith("#"), (name, value)
        assert not re.search(r"url\((?!#)", value or "") and "javascript:" not in (value or ""), value


@pytest.mark.pictures
def test_report_is_self_contained(whole):
    """Fault: a script, a font, a picture or a style sheet from elsewhere; a style that leaks out of a figure."""
    page, text = whole
    check_safe(page)
    assert "http://" not in text and "https://" not in text and "@import" not in text
    assert page.tags.count("style") == 1 and page.tags.count("svg") == 7
    assert "default-src 'none'" in text


@pytest.mark.pictures
def test_report_shows_what_a_person_wants(whole):
    """Fault: a headline figure left out, in the wrong unit, or rounded into another number."""
    text = whole[0].text
    for words in (
        "digits, FedAvg, Dirichlet 0.3",
        "90.03 % test accuracy",
        "100 rounds",
        "2.47 s in compilation",
        "412 MB peak memory",
        "314 MB sent down to clients",
        "1 of 100 rounds were skipped",
        "updates with non-finite numbers were dropped",
        "brought no report",
        "min 4, q25 41, median 68, q75 97, max 160",
        "Half of the clients have 41 to 97 examples",
        "The test accuracy rose from 26.00 % after round 5 to 90.03 % after round 100.",
        "After round 100 the median client has an accuracy of",
        "versions.jax 0.10.2",
        "cpu:0, cpu:1",
        "fedjax-sim run --config config.toml",
        "concentration = 0.3",
        "epsilon 2.31 at delta 1e-06. The server is trusted.",
    ):
        assert words in text, words


@pytest.mark.pictures
def test_report_is_deterministic(tmp_path, whole):
    """Fault: a date, a random id, an order of a set, or a user's matplotlibrc in the page."""
    import matplotlib

    with matplotlib.rc_context({"lines.linewidth": 9, "svg.fonttype": "path", "axes.facecolor": "red"}):
        again = write_report(fake_run(tmp_path / "whole")).read_text(encoding="utf-8")
    assert again == whole[1]
    assert not list((tmp_path / "whole").glob(".*"))


@pytest.mark.pictures
def test_svg_ids_do_not_collide(whole):
    """Fault: a second figure clipped or marked by the first one's shapes."""
    page, _ = whole
    ids = [value for name, value in page.attributes if name == "id"]
    used = {v for n, value in page.attributes for v in re.findall(r"url\(#([^)]+)\)", value or "")}
    used |= {value[1:] for name, value in page.attributes if name == "href"}
    assert len(ids) == len(set(ids)) and used and used == set(ids)
    assert {id.split("-")[0] for id in ids} == {
        "rounds",
        "bytes",
        "seconds",
        "spread",
        "labels",
        "sizes",
        "participation",
    }


@pytest.mark.pictures
def test_hostile_strings_are_escaped(tmp_path):
    """Fault: any string of a file reaching the page as markup, a formula or a path."""
    folder = fake_run(tmp_path / "<b>run", rounds=6)
    (folder / "config.toml").write_text(f"name = '{HOSTILE}'\n\0\x1b[31m")
    (folder / "config.toml").write_bytes((folder / "config.toml").read_bytes() + b"\xff\xfe")
    edit_json(folder / "summary.json", name=HOSTILE, test_accuracy=HOSTILE, rounds=[HOSTILE], **{HOSTILE: HOSTILE})
    edit_json(folder / "env.json", command=HOSTILE, devices=[HOSTILE], **{HOSTILE: {HOSTILE: [{HOSTILE: HOSTILE}]}})
    names = [HOSTILE, *["]]>\x00\x1b", "$\\", "日本", "<svg/onload=x>", "__import__"] * 2]
    quantiles = {"min": HOSTILE, "q25": None, "median": [1], "q75": 10**400, "max": "nan"}
    ids = [HOSTILE] * 24
    edit_json(folder / "population.json", name=HOSTILE, label_names=names, client_ids=ids, examples_quantiles=quantiles)
    edit_records(folder, lambda record: record.update(round=HOSTILE) if record["round"] == 3 else None)
    edit_records(folder, lambda record: record | {"train_sample_clients": HOSTILE})
    edit_records(folder, lambda record: record | ({"variance_total": 1.0} if record["round"] == HOSTILE else {}))
    page, text = rendered(folder)
    check_safe(page)
    assert "<script" not in text and "<img" not in text and "<b>run" not in text
    assert "alert(1)" in page.text and "could not be drawn" not in page.text


def unfinished(folder):
    (folder / "summary.json").unlink()
    edit_records(folder, lambda r: r | {"clients_reported": 90, "dropped_clients": 4})
    return "This run has not finished", "up to round 10", "sent up by clients", "940 client visits"


def stopped(folder):
    edit_json(folder / "summary.json", finished=False)
    return ("stopped before its last round, after round 10",)


def no_evaluation(folder):
    edit_records(folder, lambda r: {k: v for k, v in r.items() if not k.startswith(("test_", "held_out"))})
    return "No evaluation has been recorded", "spread between clients was not recorded"


def not_a_number(folder):
    edit_records(folder, lambda r: r.update(local_loss="nan", test_loss="inf") if r["round"] >= 4 else None)
    edit_json(folder / "summary.json", test_loss="nan")
    return "local training loss was not finite in 7 rounds, first in round 4", "not a number test loss"


def never_a_number(folder):
    edit_records(folder, lambda r: {k: "nan" if isinstance(v, float) else v for k, v in r.items()})
    return ("local training loss was not finite in 10 rounds, first in round 1",)


def only_metrics(folder):
    for name in ("summary.json", "timing.jsonl", "population.json", "env.json", "config.toml"):
        (folder / name).unlink()
    return (
        "No timing.jsonl in this folder",
        "No population.json in this folder",
        "No env.json in this folder",
        "No config.toml in this folder",
        "The command was not recorded",
        "– in compilation",
    )


def only_config(folder):
    for path in folder.iterdir():
        if path.name != "config.toml":
            path.unlink()
    return "No round has been recorded", "concentration = 0.3", "The log does not record who took part"


def torn(folder):
    path = folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    (folder / "env.json").write_text('{"versions": ')
    (folder / "population.json").write_text("[1]")
    return "1 lines of metrics.jsonl could not be read", "env.json could not be read", "population.json holds no object"


def nested_too_deep(folder):
    (folder / "env.json").write_text("[" * 200_000)
    return ("env.json could not be read",)


def nonsense(folder):
    edit_json(folder / "population.json", label_counts=[[1, 2], [3]], examples_quantiles=3)
    counts = {"clients_invited": "nan", "clients_reported": -3, "uplink_bytes": "many"}
    edit_records(folder, lambda r: r.update(held_out_loss_quantiles=[1, 2], local_accuracy={"a": 1}, **counts))
    return ("This figure could not be drawn",)


def counts_differ(folder):
    edit_json(folder / "summary.json", dropped_clients=77)
    return ("summary.json counts 77 dropped clients, the log 0",)


def nothing_lost(folder):
    return (
        "Nothing was dropped or skipped.",
        "All 1,000 invitations brought a report.",
    )


def before_training(folder):
    edit_records(folder, lambda r: r.update(distinct_clients=60 + r["round"], skipped_rounds=int(r["round"] == 3)))
    log = folder / "metrics.jsonl"
    start = {"round": 0, "test_loss": 2.3, "train_loss": 2.4, "train_sample_clients": 50}
    log.write_text(json.dumps(start) + "\n" + log.read_text())
    return "1 of 10 rounds were skipped", "70 different clients took part", "over a fixed sample of 50 clients"


CASES = (
    before_training,
    unfinished,
    stopped,
    no_evaluation,
    not_a_number,
    never_a_number,
    only_metrics,
    only_config,
    torn,
)
CASES += (nested_too_deep, nonsense, counts_differ, nothing_lost)


SOME = (before_training, unfinished, not_a_number, torn, nonsense, nested_too_deep, counts_differ)


@pytest.mark.default_rows("unfinished")
@pytest.mark.pictures
@pytest.mark.parametrize("case", cases.rows(CASES, SOME))
@pytest.mark.filterwarnings("error")
def test_degraded_runs_are_reported(tmp_path, case):
    """Fault: no report for the run that most needs one, or one that does not report what is missing."""
    folder = fake_run(tmp_path / "run", rounds=10, clean=True)
    words = case(folder)
    page, _ = rendered(folder)
    check_safe(page)
    for expected in words:
        assert expected in page.text, (expected, page.text)


def test_the_axis_is_chosen_by_a_button(tmp_path):
    """Fault: an axis without a button, a view that no button shows, or an axis of epsilon in a run without noise."""
    folder = fake_run(tmp_path / "run", rounds=10)
    _, text = rendered(folder)
    assert re.findall(r'class="pick(\d)"', text) == re.findall(r'class="view view(\d)"', text) == ["0", "1", "2"]
    assert text.count(" checked>") == 1 and "Epsilon" not in text
    for i in range(html.MOST_VIEWS):
        assert f".choice:has(.pick{i}:checked) > .view{i}" in text, i
    edit_records(folder, lambda record: record | ({"epsilon": 0.1 * record["round"]} if "test_loss" in record else {}))
    _, text = rendered(folder)
    assert "Epsilon spent so far" in text and text.count('type="radio"') == 4


def test_a_figure_is_laid_out_once(monkeypatch):
    """Fault: a figure that is gone through once more for its layout, or laid out for texts of other widths."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    laid_out, execute = [], ConstrainedLayoutEngine.execute
    monkeypatch.setattr(ConstrainedLayoutEngine, "execute", lambda *args: laid_out.append(execute(*args)))
    population = {"examples_histogram": {"edges": [0, 1, 2], "clients": [12_345, 67_890]}}
    figure, expected = (plots.client_sizes(population) for _ in range(2))
    pictures.drawn(figure, "sizes", "")
    assert len(laid_out) == 1
    with axes.style():
        expected.savefig(io.StringIO(), format="svg")
    assert [x.get_position().bounds for x in figure.axes] == [x.get_position().bounds for x in expected.axes]
    # As an Agg canvas would place it: texts have other widths there.
    other = plots.client_sizes(population)
    with axes.style():
        other.savefig(io.BytesIO(), format="png")
    assert other.axes[0].get_position().bounds != expected.axes[0].get_position().bounds


@pytest.mark.pictures("rounds")
def test_markers_show_their_numbers(tmp_path):
    """Fault: a number that is another point's, or none."""
    folder = fake_run(tmp_path / "run", rounds=10, clean=True)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    _, text = rendered(folder)
    for record in (records[4], records[9]):
        accuracy = f"{100 * record['test_accuracy']:.5g}"
        assert f"<title>test: Accuracy (%) {accuracy}, Round {record['round']}</title>" in text


def test_a_loss_that_falls_tenfold_is_on_a_logarithmic_axis():
    def scale(losses):
        rows = [{"round": r, "test_loss": loss} for r, loss in enumerate(losses)]
        return plots.learning_curves(rows).axes[0].get_yscale()

    assert scale([2.0, 0.5, 0.2]) == "log"
    assert {scale([2.0, 0.5, 0.21]), scale([2.0, 0.0]), scale([]), scale([2.0, -1.0])} == {"linear"}


def test_labels_are_a_heat_map_of_percent():
    """Fault: shares of the label and not of the client, labels in another order, rare labels that are lost."""
    figure = plots.label_mix({"label_counts": [[1, 3], [4, 0]], "label_names": ["no", "yes"], "client_ids": [7, 9]})
    left, right = figure.axes
    texts = {(text.get_position(), text.get_text()) for text in left.texts if text.get_text()}
    assert texts == {((0, 0), "25"), ((1, 0), "75"), ((0, 1), "100")}
    assert [bar.get_width() for bar in right.patches] == [4, 4]
    counts = np.arange(100).reshape(2, 50)
    left, right = plots.label_mix({"label_counts": counts.tolist()}).axes
    assert len(left.get_xticklabels()) == plots.MOST_LABELS and left.get_xticklabels()[-1].get_text() == "others"
    np.testing.assert_allclose(left.collections[0].get_array().filled(0).sum(1), 100)
    assert [bar.get_width() for bar in right.patches] == counts.sum(1).tolist()


def test_rounds_without_messages_have_no_loss():
    """Fault: an asynchronous step without arrivals, or a round to which nobody came, told as a loss that diverged."""
    counts = [(0, 0), (3, 0), (0, 2), (0, 0)]
    records = [
        {"round": t + 1, "local_loss": "nan", "clients_reported": came, "dropped_clients": lost}
        for t, (came, lost) in enumerate(counts)
    ]
    words = list(sections.state_of_the_run({"finished": True}, records, {"rounds": 4}))
    assert words == ["The local training loss was not finite in 2 rounds, first in round 2."]
    assert not list(sections.state_of_the_run({"finished": True}, records[::3], {"rounds": 4}))


@pytest.mark.parametrize("case", [nothing_lost, only_config])
def test_without_matplotlib(tmp_path, monkeypatch, case):
    """Fault: no report at all where the plot extra is not installed."""
    folder = fake_run(tmp_path / "run", rounds=10, clean=True)
    case(folder)
    real = builtins.__import__

    def absent(name, *arguments):
        if name.split(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name)
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", absent)
    page, _ = rendered(folder)
    assert "svg" not in page.tags and "concentration = 0.3" in page.text
    assert "pip install fedjax_sim[plot]" in page.text or case is only_config


@pytest.mark.full  # by default tests/test_package.py imports it
def test_importing_the_report_does_not_import_matplotlib():
    """Fault: an extra that every import needs, or a slow `--help`."""
    import subprocess

    code = "import sys, fedjax_sim.report.page, fedjax_sim.report.plots; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_an_interrupted_report_keeps_the_old_one(tmp_path, monkeypatch):
    """Fault: a report written in place."""
    folder = fake_run(tmp_path / "run", rounds=2)
    monkeypatch.setattr(axes, "to_svg", lambda *_: "<svg></svg>")
    before = write_report(folder).read_bytes()
    edit_json(folder / "summary.json", name="another")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_report(folder)
    assert (folder / "report.html").read_bytes() == before and not list(folder.glob(".*"))


def test_a_folder_without_a_run_is_refused(tmp_path):
    """Fault: an empty page for a mistyped path."""
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(FileNotFoundError, match="run_directory: expected a folder with"):
            write_report(path)


def test_thinning_keeps_gaps_and_means():
    """Fault: thinning that hides a gap or moves the mean."""
    x = np.arange(1, 100_001.0)
    at, values, blocks = plots._thin(x, np.where(x == 7, np.nan, x))
    assert len(at) == plots.MOST_POINTS and blocks == 250
    assert np.isnan(values[0]) and values[1] == x[250:500].mean()
    records = [{"round": r} | ({"test_loss": r} if r % 5 == 0 else {}) for r in range(1, 11)]
    (curve,) = plots.learning_curves(records).axes[0].lines
    assert curve.get_xydata().tolist() == [[5, 5], [10, 10]]  # rounds without an evaluation are no gaps


@pytest.mark.full  # by default what thins them, above
@pytest.mark.pictures
def test_long_runs_stay_small(tmp_path):
    """Fault: a page that grows with the rounds."""
    folder = fake_run(tmp_path / "run", rounds=5000)
    edit_records(folder, lambda record: record.update(dropped_clients=1, skipped_rounds=1))
    _, text = rendered(folder)
    assert len(text) < 600_000 and "mean of 13" in text


def test_curves_show_the_recorded_numbers():
    """Fault: bytes not accumulated, or not those sent besides, percent taken for shares, evaluation at the wrong round,
    NaN drawn as zero."""
    rows = [
        {"round": r, "local_loss": 1.0 / r, "local_accuracy": 0.1 * r, "uplink_bytes": 1e6, "downlink_bytes": 2e6}
        for r in (1, 2, 3)
    ]
    rows[1] |= {"test_loss": 0.7, "test_accuracy": 0.25, "local_loss": "nan"}
    loss, accuracy = plots.learning_curves(rows, "bytes").axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in accuracy.lines}
    assert lines["local"] == [[3, 10], [6, 20], [9, pytest.approx(30)]] and lines["test"] == [[6, 25]]
    more = [row | {"split_up_bytes": 3e6} for row in rows]
    drawn = plots.learning_curves(more, "bytes", ["split_up_bytes"]).axes[1]
    assert drawn.lines[0].get_xdata().tolist() == [6, 12, 18] and "all ways" in drawn.get_xlabel()
    assert "(MB)" in accuracy.get_xlabel() and accuracy.get_ylabel() == "Accuracy (%)"
    local, cross, test = loss.lines
    assert math.isnan(local.get_ydata()[1]) and cross.get_xdata().tolist() == [6] and cross.get_label() == "not finite"
    assert test.get_color() == accuracy.lines[-1].get_color()
    assert plots.learning_curves(rows, "rounds").axes[0].lines[-1].get_xydata().tolist() == [[2, 0.7]]
    with refused("x", value="round", hint="'rounds'"):
        plots.learning_curves(rows, "round")


def test_words_fit_what_happened():
    """Catches half of a way that led upwards, an accuracy of a task without classes, and one example in the plural."""
    losses = [{"round": r, "test_loss": float(1 + r)} for r in (0, 1)]
    assert learning_in_words(losses).endswith("after round 1.")
    assert "Half of the way" in learning_in_words([losses[1], losses[0] | {"round": 2}])
    assert "test accuracy" not in tiles({"test_accuracy": None, "test_loss": 1.0})
    assert "test accuracy" in tiles({"test_accuracy": None, "test_loss": None})
    sizes = dict.fromkeys(("min", "q25", "q75", "max"), 1)
    assert sizes_in_words({"examples_quantiles": sizes}) == "Every client has 1 example."
    assert "all of their examples" in labels_in_words({"label_counts": [[3, 0], [0, 2]]})


def test_panels_have_curves():
    """Catches an empty panel of accuracies beside a regression's losses, and an attack's success that is lost."""
    losses = [{"round": r, "test_loss": 1.0 / r, "held_out_loss_quantiles": [0.1, 0.2, 0.3, 0.4, 0.5]} for r in (1, 2)]
    for draw in (plots.learning_curves, plots.client_spread):
        (loss,) = draw(losses).axes
        assert "loss" in loss.get_ylabel().lower()
    _, shares = plots.learning_curves([row | {"attack_success": 0.5} for row in losses]).axes
    assert shares.lines[0].get_label() == "attack success"
    with_accuracy = [row | {"held_out_accuracy_quantiles": [0.5, 0.6, 0.7, 0.8, 0.9]} for row in losses]
    assert [axes.get_ylabel() for axes in plots.client_spread(with_accuracy).axes][1] == "Held-out accuracy (%)"


@pytest.mark.parametrize("key, expected", [("explanation", "at most 7.4 times"), ("refused", "No epsilon holds")])
def test_privacy_is_reported(tmp_path, key, expected):
    """Catches an epsilon that is in a file only, and noise without an accountant that looks like privacy."""
    folder = fake_run(tmp_path / "run", 5)
    summary = json.loads((folder / "summary.json").read_text())
    summary["privacy"] = {"statement": "epsilon 2", key: f"at most 7.4 times\n{HOSTILE}"}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = write_report(folder).read_text()
    assert "<h2>Privacy</h2>" in page and expected in page and "<script>" not in page
    if key == "explanation":  # that line names whatever else the page shows
        named = page.partition("no epsilon covers: ")[2].partition("</p>")[0]
        files = [json.loads((folder / f"{name}.json").read_text()) for name in ("summary", "population")]
        files += map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        missing = {name for held in files for name in held if name not in named}
        assert missing <= {"round", "epsilon", "privacy", "name", "finished"} and "seed" in named
    del summary["privacy"]
    (folder / "summary.json").write_text(json.dumps(summary))
    assert "<h2>Privacy</h2>" not in write_report(folder).read_text()


@pytest.mark.pictures("variance")
def test_an_aggregate_without_variance(tmp_path):
    """Catches a division by a variance of zero, and a colon with nothing after it."""
    folder = fake_run(tmp_path / "run", 5)
    edit_records(folder, lambda record: record | {"variance_total": 0.0, "variance_minibatch": 1e-9})
    page, _ = rendered(folder)
    assert "the aggregate's variance was 0. Estimated" in page.text


def test_a_stale_summary_is_left_out(tmp_path):
    """Catches the epsilon of 5 rounds on the page of a run that went on to 8."""
    folder = fake_run(tmp_path / "run", 8)
    edit_json(folder / "summary.json", rounds=5)
    page, _ = rendered(folder)
    assert "summary.json was left out. It covers 5 rounds, the log 8" in page.text and "epsilon 2.31" not in page.text


def test_totals_of_some_runs_are_shown_in_those(tmp_path):
    """Catches an empty tile about an entropy code in the report of every run that has none."""
    folder = fake_run(tmp_path / "run", 5)
    assert "entropy code" not in write_report(folder).read_text()
    summary = json.loads((folder / "summary.json").read_text()) | {"uplink_coded_bytes": 7_000_000}
    (folder / "summary.json").write_text(json.dumps(summary))
    page = write_report(folder).read_text()
    assert "entropy code" in page and "7 MB" in page


@pytest.mark.full
@pytest.mark.pictures
def test_an_attack_is_shown_beside_the_clean_accuracy(tmp_path):
    """Fault: a backdoor's success that only the log has, one that a killed run lacks, a share that is not in per cent,
    and attack words on the page of a run without one."""
    folder = fake_run(tmp_path / "attacked")
    assert "attack" not in write_report(folder).read_text(encoding="utf-8")
    edit_records(
        folder, lambda r: r | {"attack_success": r["round"] / 101.5, "test_bias": 0.25} if "test_loss" in r else r
    )
    edit_json(folder / "summary.json", attack_success=100 / 101.5, test_bias=0.25)
    edit_json(folder / "population.json", poisons=["backdoor to 7 at 5 of <100> clients"], notes=["x / 255"])
    poisoned = "Poisoned backdoor to 7 at 5 of <100> clients"
    for words in ("98.52 % attack success", "0.25 test bias", poisoned, "Read x / 255"):
        assert words in Page(write_report(folder).read_text(encoding="utf-8")).text, words
    assert "Accuracy, attack success (%)" in write_report(folder).read_text(encoding="utf-8")
    (folder / "summary.json").unlink()
    assert "98.52 % attack success" in Page(write_report(folder).read_text(encoding="utf-8")).text


def timed_run(folder):
    """A run of 20 rounds of simulated time, and the clients of the round after it."""
    fake_run(folder, 20)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for i, record in enumerate(lines):
        record |= {"simulated_seconds": 700.0 * (i + 1), "round_seconds": 700.0, "joules": 1e5, "wasted_joules": 2e4}
    write_lines(folder / "metrics.jsonl", lines)
    ends = ("reported", "cut off", "left", "silent")
    clients = [{"id": i, "download": 1.0, "training": 5.0, "sending": 2.0, "end": ends[i % 4]} for i in range(7)]
    about = {"begins": 14_000.0, "lasts": 8.0, "invited": 90, "reported": 30, "clients": clients}
    (folder / "timeline.json").write_text(json.dumps(about))
    return about


@pytest.mark.pictures("timeline")
def test_simulated_time_is_shown(tmp_path):
    """Fault: a run with a clock whose page has no axis of simulated time, no energy, or not the clients of a round, or
    that takes the times of a heavier model for its own."""
    timed_run(tmp_path)
    page = write_report(tmp_path).read_text()
    for words in ("Loss and accuracy against simulated time.", "Simulated time (h)",
                  "Energy so far (Wh)", "3 h 53 min after the start",
                  "90 clients were invited, 30 reported", "7 of them are shown", "cut off", "left before",
                  "did not report"):  # fmt: skip
        assert words in page, words
    assert "_scale" not in page
    lines = [json.loads(line) | {"flops_scale": 12e3} for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    write_lines(tmp_path / "metrics.jsonl", lines)
    heavier = "those of a model with 12,000 times the operations and 1 times the bytes of the one that was trained"
    assert heavier in Page(write_report(tmp_path).read_text()).text
    fake_run(tmp_path / "plain", 20)
    assert "imulated" not in write_report(tmp_path / "plain").read_text()


@pytest.mark.full
@pytest.mark.pictures("timeline")
@pytest.mark.parametrize("clients", [[], [3], [{"id": HOSTILE, "download": HOSTILE, "end": HOSTILE}], {}, "x"])
def test_a_timeline_that_is_none(tmp_path, clients):
    """Fault: a page that fails over a timeline that somebody else wrote, or that shows its text as it is."""
    about = timed_run(tmp_path)
    (tmp_path / "timeline.json").write_text(json.dumps(about | {"clients": clients, "begins": HOSTILE}))
    page = write_report(tmp_path).read_text()
    assert "against simulated time" in page and "<script>" not in page and "<img" not in page
