"""ByzFL's robust rules on given messages: `python byzfl_job.py MESSAGES.npy F STEPS REPEATS OUT.npz`. Run by path."""

from __future__ import annotations

import importlib
import json
import sys
import time
import types
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import torch

package = types.ModuleType("byzfl")  # without its __init__, whose benchmark needs a torchvision that fits the torch
package.__path__ = list(find_spec("byzfl").submodule_search_locations)
sys.modules["byzfl"] = package
byzfl = importlib.import_module("byzfl.aggregators")


def main() -> None:
    """Prints {"version", "seconds": {rule: [seconds]}, "first_call_seconds", "rules_failed"}; results go to OUT."""
    host, (f, steps, repeats) = np.load(sys.argv[1]), map(int, sys.argv[2:5])
    x, mixing, trimmed = torch.from_numpy(host), byzfl.NNM(f), byzfl.TrMean(f)
    rules = {
        "median": byzfl.Median(),
        "trimmed mean": trimmed,
        "mean around median": byzfl.Meamed(f),
        "Krum": byzfl.Krum(f),
        "multi-Krum": byzfl.MultiKrum(f),
        "geometric median": byzfl.GeometricMedian(nu=1e-6, T=steps),
    }
    if x.numel() <= 10_000_000:  # it averages m - f messages for each of m: half an hour a call for 1,000 x 100,000
        rules["mixing, trimmed mean"] = lambda x: trimmed(mixing(x))
    made, first, failed = {}, {}, {}
    with torch.no_grad():
        for name, rule in rules.items():
            began = time.perf_counter()
            try:
                made[name] = np.asarray(rule(x))
                first[name] = time.perf_counter() - began
            except RuntimeError as error:  # torch.quantile takes 2^24 numbers at most
                failed[name] = str(error)[:100]
        seconds = {name: [] for name in made}
        for _ in range(repeats):
            for name in made:
                began = time.perf_counter()
                rules[name](x)
                seconds[name].append(time.perf_counter() - began)
    np.savez(sys.argv[5], **made)
    told = f"{version('byzfl')}, PyTorch {torch.__version__}, {torch.get_num_threads()} threads"
    found = {"version": told, "seconds": seconds, "first_call_seconds": first, "rules_failed": failed}
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
