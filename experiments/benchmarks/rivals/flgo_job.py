"""FLGo's asynchronous simulation, FedAsync, on given arrays: `python flgo_job.py ARRAYS.npz CONCURRENCY UPDATES`.

Run by path. The arrays are those of `common`; it deals the rows out to as many equal clients, with lognormal latencies.
The first UPDATES client updates warm up, the next UPDATES are timed. Nothing is evaluated.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import sys
import tempfile
import time
from importlib.metadata import version

import common

CONFIG = """
import numpy, torch
held = numpy.load({arrays!r}, allow_pickle=False)
x, y = held["x"], held["y"]
x, y = torch.from_numpy(x.reshape(-1, x.shape[-1])), torch.from_numpy(y.reshape(-1).astype("int64"))
train_data = torch.utils.data.TensorDataset(x, y)
def get_model():
    names = sorted(name[:-7] for name in held.files if name.endswith(".kernel"))
    layers = []
    for name in names:
        kernel, bias = held[name + ".kernel"], held[name + ".bias"]
        layer = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])
"""


def main() -> None:
    """Prints {"version", "update_seconds", "updates"}."""
    arrays, concurrency, updates = os.path.abspath(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    _, held = common.load(arrays)
    clients, rows = held["y"].shape
    batch, rate = int(held["batch_size"]), float(held["rate"])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        pathlib.Path("own_config.py").write_text(CONFIG.format(arrays=arrays), encoding="utf-8")
        import flgo
        from flgo.algorithm import fedasync
        from flgo.benchmark.partition import IIDPartitioner

        module = flgo.gen_benchmark_from_file("own", "own_config.py", target_path=folder)
        benchmark = importlib.import_module(module)
        rows_of = importlib.import_module(module + ".core").TaskPipe.TaskDataset  # newer PyTorch asks for it
        rows_of.__getitems__ = lambda self, indices: [self[i] for i in indices]
        benchmark.visualize = lambda *args: None  # its picture of the partition takes minutes
        flgo.gen_task_by_(benchmark, IIDPartitioner(num_clients=clients), task_path="own_task")
        stamps = []
        plain = fedasync.Client.train

        def train(self, model):
            plain(self, model)
            stamps.append(time.perf_counter())
            if len(stamps) > 2 * updates:
                raise KeyboardInterrupt

        fedasync.Client.train = train
        option = {
            "num_rounds": 10**6, "proportion": concurrency / clients, "num_steps": rows // batch, "batch_size": batch,
            "learning_rate": rate, "train_holdout": 0.0, "eval_interval": 10**9, "no_tqdm": True,
            "responsiveness": "LN-100-2000", "algo_para": [0.6, 0.0, "poly", 10, 6, 0.5], "gpu": [],
            "sample": "uniform", "learning_rate_decay": 1.0, "no_log_console": True,
        }  # fmt: skip
        runner = flgo.init("own_task", fedasync, option)
        with contextlib.suppress(KeyboardInterrupt):
            runner.run()
        os.chdir("/")
    form = f"torch, one thread; {concurrency} of {clients} clients in flight"
    print("\n" + json.dumps({
        "version": f"FLGo {version('flgo')} on torch {version('torch')}", "form": form,
        "update_seconds": (stamps[-1] - stamps[updates]) / (len(stamps) - 1 - updates), "updates": len(stamps),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
