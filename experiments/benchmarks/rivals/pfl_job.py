"""pfl-research's FederatedAveraging with its PyTorch backend on the arrays."""

from __future__ import annotations

import os
import time
from importlib.metadata import version

import common
import numpy as np
import torch
import torch_models
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel

job = common.read()
torch.set_num_threads(1)  # faster than two for products this small

device = get_default_device()
stamps = [0.0]


class Clock(TrainingProcessCallback):
    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if device.type == "cuda":
            torch.cuda.synchronize()
        stamps.append(time.perf_counter())
        return False, Metrics()


rng = np.random.default_rng(0)
rows = [rng.permutation(len(y)) for y in job.y]
users = [
    Dataset([torch_models.inputs(x[r]), torch_models.inputs(y[r])]) for x, y, r in zip(job.x, job.y, rows, strict=True)
]
sampler = get_user_sampler("minimize_reuse", list(range(len(users))))
data = FederatedDataset(lambda id: users[id], sampler)
network = torch_models.Network(job.kind, job.params)
model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
backend = SimulatedBackend(data, None, postprocessors=[WeightByUser()])
parameters = NNAlgorithmParams(
    central_num_iterations=job.rounds, evaluation_frequency=10**9, train_cohort_size=len(users), val_cohort_size=0
)
local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=job.rate, local_batch_size=job.batch_size)
stamps[0] = time.perf_counter()
FederatedAveraging().run(parameters, backend, model, local, None, callbacks=[Clock()])
words = f"pfl-research {version('pfl')} on torch {torch.__version__}"
processes = os.environ.get("WORLD_SIZE", "1")
form = f"{processes} processes of one torch thread on {device.type}, no evaluation, rows shuffled once"
start = torch_models.Network(job.kind, job.params).requires_grad_(False).to(device)


def logits(x):
    return start(torch_models.inputs(x)).cpu().numpy()


common.answer(job, stamps, network.weights(), logits, version=words, form=form)
