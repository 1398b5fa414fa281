"""pfl-research's FederatedAveraging with its PyTorch backend on the arrays."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

import common
import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel

job = common.read()
torch.set_num_threads(1)  # faster than two for products this small


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*kernel.shape) for kernel, _ in job.layers)
        with torch.no_grad():
            for layer, (kernel, bias) in zip(self.layers, job.layers, strict=True):
                layer.weight.copy_(torch.from_numpy(kernel.T.copy()))
                layer.bias.copy_(torch.from_numpy(bias))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)

    def loss(self, x, y, is_eval=False):
        return torch.nn.functional.cross_entropy(self(x), y)

    def metrics(self, x, y, is_eval=True):
        with torch.no_grad():
            return {"loss": Weighted(float(torch.nn.functional.cross_entropy(self(x), y, reduction="sum")), len(y))}


stamps = [0.0]


class Clock(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        stamps.append(time.perf_counter())
        return False, Metrics()


rng = np.random.default_rng(0)
rows = [rng.permutation(len(y)) for y in job.y]
users = [
    Dataset([torch.from_numpy(x[r]), torch.from_numpy(y[r].astype(np.int64))])
    for x, y, r in zip(job.x, job.y, rows, strict=True)
]
sampler = get_user_sampler("minimize_reuse", list(range(len(users))))
data = FederatedDataset(lambda id: users[id], sampler)
network = Network()
model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
backend = SimulatedBackend(data, None, postprocessors=[WeightByUser()])
parameters = NNAlgorithmParams(
    central_num_iterations=job.rounds, evaluation_frequency=10**9, train_cohort_size=len(users), val_cohort_size=0
)
local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=job.rate, local_batch_size=job.batch_size)
stamps[0] = time.perf_counter()
FederatedAveraging().run(parameters, backend, model, local, None, callbacks=[Clock()])
layers = [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in network.layers]
words = f"pfl-research {version('pfl')} on torch {torch.__version__}"
processes = os.environ.get("WORLD_SIZE", "1")
common.answer(job, stamps, layers, version=words, form=f"{processes} processes of one torch thread, no evaluation")
