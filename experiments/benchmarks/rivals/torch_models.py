"""The models in PyTorch, from and to weights in JAX's layout: dense [in, out], images and kernels channels last."""

from __future__ import annotations

import numpy as np
import torch
from pfl.internal.ops.pytorch_ops import get_default_device
from pfl.metrics import Weighted
from torch import nn
from torch.nn import functional


def inputs(x: np.ndarray) -> torch.Tensor:
    """Rows as PyTorch wants them, on the device of pfl's model: channels of images first, tokens int64."""
    if x.ndim == 4:
        x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
    return torch.from_numpy(x if x.dtype == np.float32 else x.astype(np.int64)).to(get_default_device())


class Network(nn.Module):
    """One of the kinds, with the given weights."""

    def __init__(self, kind: str, params: dict):
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleDict({name: _layer(parts) for name, parts in params.items()})
        self.channels = params["conv_1"]["kernel"].shape[-1] if "conv_1" in params else None
        with torch.no_grad():
            for name, parts in params.items():
                for weight, value in zip(_weights(self.layers[name]), self._torch(name, parts), strict=True):
                    weight.copy_(torch.from_numpy(np.ascontiguousarray(value)))

    def forward(self, x):
        layers = self.layers
        if self.kind == "lstm":
            return layers["output"](layers["layer_0"](layers["embedding"](x))[0])
        if self.kind == "mlp":
            for name in sorted(layers)[:-1]:  # hidden_0, ..., output
                x = torch.relu(layers[name](x))
            return layers["output"](x)
        x = torch.relu(layers["conv_0"](x))
        x = functional.max_pool2d(x, 2) if self.kind == "cnn_12k" else x
        x = functional.max_pool2d(torch.relu(layers["conv_1"](x)), 2).flatten(1)
        return layers["output"](torch.relu(layers["hidden"](x)) if "hidden" in layers else x)

    def loss(self, x, y, is_eval=False):
        return functional.cross_entropy(self(x).flatten(0, -2), y.flatten())

    def metrics(self, x, y, is_eval=True):
        with torch.no_grad():
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    def weights(self) -> dict:
        """{layer: {part: array}} in JAX's layout."""
        return {
            name: self._jax(name, [w.detach().cpu().numpy() for w in _weights(x)]) for name, x in self.layers.items()
        }

    def _flat(self, name: str) -> bool:
        """True for the dense layer that gets the flattened image."""
        return self.channels is not None and name == ("hidden" if "hidden" in self.layers else "output")

    def _torch(self, name: str, parts: dict) -> list:
        if "table" in parts:
            return [parts["table"]]
        kernel = parts["kernel"]
        if kernel.ndim == 4:
            return [kernel.transpose(3, 2, 0, 1), parts["bias"]]
        if self._flat(name):  # rows from (pixel, channel) to (channel, pixel)
            kernel = kernel.reshape(-1, self.channels, kernel.shape[1]).swapaxes(0, 1).reshape(kernel.shape)
        recurrent = [parts["recurrent"].T] if "recurrent" in parts else []  # gates in the same order: i, f, g, o
        return [kernel.T, *recurrent, parts["bias"]]

    def _jax(self, name: str, weights: list) -> dict:
        if len(weights) == 1:
            return {"table": weights[0]}
        kernel, *recurrent, bias = weights
        if kernel.ndim == 4:
            return {"kernel": kernel.transpose(2, 3, 1, 0), "bias": bias}
        kernel = kernel.T
        if self._flat(name):
            kernel = kernel.reshape(self.channels, -1, kernel.shape[1]).swapaxes(0, 1).reshape(kernel.shape)
        return {"kernel": kernel, "bias": bias} | ({"recurrent": recurrent[0].T} if recurrent else {})


def _layer(parts: dict) -> nn.Module:
    if "table" in parts:
        return nn.Embedding(*parts["table"].shape)
    if "recurrent" in parts:
        layer = nn.LSTM(parts["kernel"].shape[0], parts["recurrent"].shape[0], batch_first=True)
        nn.init.zeros_(layer.bias_hh_l0).requires_grad_(False)  # one bias a gate, as in the other frameworks
        return layer
    kernel = parts["kernel"]
    return (
        nn.Conv2d(kernel.shape[2], kernel.shape[3], kernel.shape[0]) if kernel.ndim == 4 else nn.Linear(*kernel.shape)
    )


def _weights(layer: nn.Module) -> list:
    return [weight for weight in layer.parameters() if weight.requires_grad]
