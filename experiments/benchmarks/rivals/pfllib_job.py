"""PFLlib's Ditto on given arrays: `python pfllib_job.py ARRAYS.npz FOLDER COHORT ROUNDS`.

Run by path. FOLDER is the `system` folder of a checkout of PFLlib. The arrays are those of `common`. Rows stay in
memory, where PFLlib reads its own files again for every training of a client. The first ROUNDS rounds warm up, the next
ROUNDS are timed. Nothing is evaluated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import pathlib
import sys
import time

import common
import numpy as np


def main() -> None:
    """Prints {"version", "form", "round_seconds"}."""
    _, held = common.load(sys.argv[1])
    params, _ = common.load(sys.argv[1])
    folder, cohort, rounds = pathlib.Path(sys.argv[2]).resolve(), int(sys.argv[3]), int(sys.argv[4])
    sys.path.insert(0, str(folder))
    import torch
    from flcore.clients import clientbase
    from flcore.servers import serverbase
    from flcore.servers.serverditto import Ditto

    x, y = torch.from_numpy(held["x"]), torch.from_numpy(held["y"].astype("int64"))
    clients = len(x)

    def rows(dataset, client, is_train=True, few_shot=0):
        return list(zip(x[client], y[client], strict=True)) if is_train else []

    clientbase.read_client_data = serverbase.read_client_data = rows
    layers = []
    for kernel, bias in common.dense_layers(params):
        layer = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
            layer.bias.copy_(torch.from_numpy(bias))
        layers += [layer, torch.nn.ReLU()]
    options = {
        "model": torch.nn.Sequential(*layers[:-1]), "algorithm": "Ditto", "dataset": "own", "device": "cpu",
        "save_folder_name": "items", "num_classes": len(layers[-2].bias), "batch_size": int(held["batch_size"]),
        "local_learning_rate": float(held["rate"]), "local_epochs": 1, "plocal_epochs": 1, "mu": 0.1, "few_shot": 0,
        "learning_rate_decay": False, "learning_rate_decay_gamma": 0.99, "global_rounds": rounds,
        "num_clients": clients, "join_ratio": cohort / clients, "random_join_ratio": False, "time_select": False,
        "goal": "time", "time_threthold": 1e9, "top_cnt": 100, "auto_break": False, "eval_gap": 10**9,
        "client_drop_rate": 0.0, "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100,
        "batch_num_per_client": 2, "num_new_clients": 0, "fine_tuning_epoch_new": 0,
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        server = Ditto(argparse.Namespace(**options), 0)
    stamps = []
    for _ in range(2 * rounds + 1):
        stamps.append(time.perf_counter())
        server.selected_clients = server.select_clients()
        server.send_models()
        for client in server.selected_clients:
            client.ptrain()
            client.train()
        server.receive_models()
        server.aggregate_parameters()
    print("\n" + json.dumps({
        "version": f"PFLlib on torch {torch.__version__}",
        "form": f"one process, {torch.get_num_threads()} threads, rows in memory",
        "round_seconds": np.diff(stamps)[rounds:].tolist(),
    }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
