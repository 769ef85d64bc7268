"""The ops' formulas a second time, as loops over single values in Python's numbers, which are float64.

An op and its reference may share code. These formulas share none with the library.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def kept(seed: int, row: int, columns: int, threshold: int) -> list[bool]:
    """One row of dropout's mask: Philox 4x32-10 in Python integers."""
    word, m0, m1, w0, w1 = 0xFFFFFFFF, 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
    keep = []
    for column in range(columns):
        c = [column // 8, row, 0, 0]
        k = [seed & word, (seed >> 32) & word]
        for _ in range(10):
            p0, p1 = m0 * c[0], m1 * c[2]
            c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & word, (p0 >> 32) ^ c[3] ^ k[1], p0 & word]
            k = [(k[0] + w0) & word, (k[1] + w1) & word]
        lane = column % 8
        keep.append((c[lane // 2] >> (16 * (lane % 2))) & 0xFFFF >= threshold)
    return keep


def dropout_factor(seed: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """keep * scale of a [R, N] tensor, in float64."""
    dropped = round(p * 65536)
    rows = [kept(int(seed), row, shape[1], dropped) for row in range(shape[0])]
    return torch.tensor(rows, dtype=torch.float64) * (65536 / (65536 - dropped))


def activation(name: str, z: float) -> float:
    """Each activation from its paper."""
    normal = 0.5 * (1 + math.erf(z / math.sqrt(2)))
    inner = math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)
    return {
        "relu": max(z, 0.0),
        "leaky_relu": z if z > 0 else 0.01 * z,
        "gelu": z * normal,
        "gelu_tanh": 0.5 * z * (1 + math.tanh(inner)),
        "silu": z / (1 + math.exp(-z)),
        "squared_relu": max(z, 0.0) ** 2,
        "star_relu": 0.8944 * max(z, 0.0) ** 2 - 0.4472,
        "sigmoid": 1 / (1 + math.exp(-z)),
        "smelu": 0.0 if z <= -2 else z if z >= 2 else (z + 2) ** 2 / 8,
    }[name]


def activated(name: str, z: Tensor) -> Tensor:
    return torch.tensor([activation(name, value) for value in z.flatten().tolist()], dtype=torch.float64).view(z.shape)


def rms_norm(s: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of a [R, N] tensor, row by row."""
    rows = [
        [value / math.sqrt(sum(entry * entry for entry in row) / len(row) + eps) for value in row] for row in s.tolist()
    ]
    return torch.tensor(rows, dtype=torch.float64) * weight.double()


def layer_norm(s: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm of a [R, N] tensor, row by row."""
    rows = []
    for row in s.tolist():
        mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        rows.append([(value - mean) / math.sqrt(variance + eps) for value in row])
    return torch.tensor(rows, dtype=torch.float64) * weight.double() + bias.double()


def softmax(scores: Tensor, sees: Tensor, scale: float) -> Tensor:
    """Softmax of a [T, S] tensor over the places where `sees` is True, row by row; 0 elsewhere."""
    rows = []
    for row, seen in zip(scores.tolist(), sees.tolist(), strict=True):
        weights = [math.exp(scale * value) if is_seen else 0.0 for value, is_seen in zip(row, seen, strict=True)]
        rows.append([weight / (sum(weights) or 1.0) for weight in weights])
    return torch.tensor(rows, dtype=torch.float64)
