"""The networks in PyTorch, with the layer names of Linen."""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.workloads import Workload


class MLP(nn.Module):
    def __init__(self, n_classes, width):
        super().__init__()
        self.Dense_0 = nn.Linear(64, width)
        self.Dense_1 = nn.Linear(width, n_classes)

    def forward(self, x):
        return self.Dense_1(F.relu(self.Dense_0(x)))


class CNN(nn.Module):
    def __init__(self, n_classes, first, second, width):
        super().__init__()
        self.Conv_0 = nn.Conv2d(1, first, 3, padding=1)
        self.Conv_1 = nn.Conv2d(first, second, 3, padding=1)
        self.Dense_0 = nn.Linear(7 * 7 * second, width)
        self.Dense_1 = nn.Linear(width, n_classes)
        for layer in self.children():  # With the spread of linen's: a model learns otherwise.
            nn.init.normal_(layer.weight, std=layer.weight[0].numel() ** -0.5)
            nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        # A view: the images stay in their order, which is "channels last", the fastest.
        x = x.permute(0, 3, 1, 2)
        for convolution in (self.Conv_0, self.Conv_1):
            x = F.avg_pool2d(F.relu(convolution(x)), 2)
        x = F.relu(self.Dense_0(x.permute(0, 2, 3, 1).flatten(1)))
        return self.Dense_1(x)


class Attention(nn.Module):
    def __init__(self, width, n_heads):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_heads = n_heads

    def forward(self, x):
        n, length, width = x.shape
        heads = self.qkv(x).view(n, length, 3, self.n_heads, width // self.n_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(n, length, width))


class Transformer(nn.Module):
    def __init__(self, n_classes, width, n_layers, n_heads, length):
        super().__init__()
        self.Embed_0, self.Embed_1 = _embedding(n_classes, width), _embedding(length, width)
        self.n_layers = n_layers
        for i in range(n_layers):
            self.add_module(f"LayerNorm_{2 * i}", nn.LayerNorm(width, 1e-6))
            self.add_module(f"MultiHeadDotProductAttention_{i}", Attention(width, n_heads))
            self.add_module(f"LayerNorm_{2 * i + 1}", nn.LayerNorm(width, 1e-6))
            self.add_module(f"Dense_{2 * i}", nn.Linear(width, 4 * width))
            self.add_module(f"Dense_{2 * i + 1}", nn.Linear(4 * width, width))
        self.add_module(f"LayerNorm_{2 * n_layers}", nn.LayerNorm(width, 1e-6))
        self.add_module(f"Dense_{2 * n_layers}", nn.Linear(width, n_classes))

    def forward(self, x):
        layers = dict(self.named_children())
        x = self.Embed_0(x) + self.Embed_1.weight
        for i in range(self.n_layers):
            normed = layers[f"LayerNorm_{2 * i}"](x)
            x = x + layers[f"MultiHeadDotProductAttention_{i}"](normed)
            hidden = layers[f"Dense_{2 * i}"](layers[f"LayerNorm_{2 * i + 1}"](x))
            x = x + layers[f"Dense_{2 * i + 1}"](F.gelu(hidden, approximate="tanh"))
        n = 2 * self.n_layers
        return layers[f"Dense_{n}"](layers[f"LayerNorm_{n}"](x))


class Recommender(nn.Module):
    def __init__(self, n_classes, n_ids, width):
        super().__init__()
        self.Embed_0, self.Embed_1 = _embedding(n_ids, width), _embedding(n_ids, width)
        self.Dense_0 = nn.Linear(3 * width, 2 * width)
        self.Dense_1 = nn.Linear(2 * width, n_classes)

    def forward(self, x):
        user, item = self.Embed_0(x[:, 0]), self.Embed_1(x[:, 1])
        x = torch.cat([user, item, user * item], -1)
        return self.Dense_1(F.relu(self.Dense_0(x)))


def _embedding(n: int, width: int) -> nn.Module:
    layer = nn.Embedding(n, width)
    nn.init.normal_(layer.weight, std=width**-0.5)  # Likewise.
    return layer


_NETWORKS = {"mlp": MLP, "cnn": CNN, "transformer": Transformer, "recommender": Recommender}


def build(workload: Workload, params: Any = None) -> nn.Module:
    """Returns the network of a workload, with the given parameters of the Linen network."""
    model = _NETWORKS[workload.name](workload.n_classes, *workload.sizes)
    if params is not None:
        with torch.no_grad():
            for name, layer in model.named_children():
                _carry_over(params[name], layer)
    return model


def _carry_over(params: Any, layer: nn.Module) -> None:
    """Sets the parameters of a layer to those of the Linen layer of that name."""
    if isinstance(layer, Attention):
        width = layer.out.in_features
        parts = [params[name] for name in ("query", "key", "value")]
        kernel = np.hstack([part["kernel"].reshape(width, width) for part in parts])
        bias = np.hstack([part["bias"].reshape(width) for part in parts])
        _carry_over({"kernel": kernel, "bias": bias}, layer.qkv)
        kernel = params["out"]["kernel"].reshape(width, width)
        _carry_over({"kernel": kernel, "bias": params["out"]["bias"]}, layer.out)
        return
    tensors = {name: torch.tensor(array) for name, array in params.items()}
    if "bias" in tensors:
        layer.bias.copy_(tensors["bias"])
    weight = next(tensors[name] for name in ("kernel", "scale", "embedding") if name in tensors)
    if isinstance(layer, nn.Linear):
        weight = weight.T
    elif isinstance(layer, nn.Conv2d):
        weight = weight.permute(3, 2, 0, 1)
    layer.weight.copy_(weight)
