"""`fedjax-sim data`: what it says of the clients is what they hold."""

import re

import numpy as np
import pytest
from typer.testing import CliRunner

from fedjax_sim import population
from fedjax_sim.command.app import app


def invoke(*words):
    return CliRunner().invoke(app, ["data", *words])


def test_the_clients_of_a_config(tmp_path):
    """Catches numbers of other clients, shares of the wrong axis, and a picture that is not written."""
    out = tmp_path / "clients.png"
    done = invoke("--set", "data.num_clients=60", "--set", "data.alpha=0.1", "--set", "seed=4", "--out", str(out))
    assert done.exit_code == 0, done.output
    data = population.digits(num_clients=60, alpha=0.1, seed=4)
    counts = np.zeros((60, 10), int)
    for id in range(60):
        client = data.train.client(id)
        counts[id] = np.bincount(np.asarray(client.examples["y"])[np.asarray(client.mask)], minlength=10)
    lines = [re.split(r"  +", line.strip(), maxsplit=1) for line in done.output.splitlines()]
    shown = {line[0]: line[1] for line in lines if len(line) == 2}
    assert shown["clients"] == "60" and shown["examples at clients"] == f"{counts.sum():,}"
    sizes = counts.sum(axis=1)
    assert shown["examples of a client"].startswith(f"{sizes.min()} to {sizes.max()}; quartiles ")
    held = (counts > 0).sum(axis=1)
    assert shown["labels of a client"] == f"{held.min()} to {held.max()}, {held.mean():.3g} on average"
    shares = counts / sizes[:, None]
    variation = (0.5 * np.abs(shares - counts.sum(0) / counts.sum()).sum(1) * sizes).sum() / sizes.sum()
    assert shown["total variation from all labels"].startswith(f"{variation:.4g},")
    assert out.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "clients.pdf"], "--out: expected a name that ends in .png or .svg"),
        (["--set", "data.alpha=0.0"], "data.alpha"),
        (["--set", "data.name=table", "--set", "data.file=no.csv", "--set", "data.label=y"], "data.file"),
        (["--set", "data.name=linear_teacher", "--out", "a.png"], "--out: expected a task with classes"),
    ],
)
def test_wrong_arguments(words, message):
    done = invoke(*words)
    assert done.exit_code == 2 and message in done.output, done.output


def test_a_table_in_a_config(tmp_path):
    """Catches a partitioner that a config cannot name, and one that ignores its options or the seed."""
    path = tmp_path / "rows.csv"
    path.write_text("x,y\n" + "".join(f"{i / 7},{i % 3}\n" for i in range(90)))
    settings = ["data.name=table", f"data.file={path}", "data.label=y", "data.test_fraction=0.2",
                'data.partition.name="pathological"', "data.partition.num_clients=9"]  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    done = invoke(*words, "--set", "data.partition.classes_per_client=1")
    assert done.exit_code == 0, done.output
    assert "labels of a client" in done.output and "1 to 1, 1 on average" in done.output
    wrong = invoke(*words, "--set", "data.partition.clases_per_client=1")
    assert wrong.exit_code == 2 and "classes_per_client" in wrong.output
