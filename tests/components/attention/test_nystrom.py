import math

import pytest
import torch
from torch import Tensor

from fuselayers.components import NystromAttention
from tests.components.attention import contract
from tests.components.attention.contract import HEADS, HIDDEN_DIM, MEMORY, MEMORY_CASES, heads_of, joined, small


def made(**options: object) -> NystromAttention:
    return small(NystromAttention(HIDDEN_DIM, **{"num_heads": 6, "num_landmarks": 3, **options}))


def means(x_HTC: Tensor, most: int) -> Tensor:
    """The means of segments of nearly equal length: [H, T, C] -> [H, M, C]."""
    tokens = x_HTC.shape[1]
    segments: list[list[int]] = [[] for _ in range(min(most, tokens))]
    for token in range(tokens):
        segments[token * len(segments) // tokens].append(token)
    return torch.stack([x_HTC[:, at].mean(1) for at in segments], 1)


def reference(
    layer: NystromAttention, x_BTD: Tensor, rotate: object, real_BT: Tensor | None, memory: Tensor | None = None
) -> Tensor:
    """Row by row, with the padding taken out of the row first."""
    q, k, v = heads_of(layer, x_BTD, rotate)
    if memory is not None:
        _, k, v = heads_of(layer, memory, None)
    root = math.sqrt(layer.head_dim)
    rows = []
    for b, tokens in enumerate([x_BTD.shape[1]] * len(x_BTD)):
        real = list(range(k.shape[2])) if real_BT is None else real_BT[b].nonzero().flatten().tolist()
        mixed = torch.zeros_like(q[b])
        if real:
            q_means = means(q[b] if memory is not None else q[b][:, real], layer.num_landmarks)
            k_means = means(k[b][:, real], layer.num_landmarks)
            a = (q_means @ k_means.mT / root).softmax(-1)
            z = torch.stack([head.T / (head.sum(0).max() * head.sum(1).max()) for head in a])
            identity = torch.eye(q_means.shape[1], dtype=a.dtype)
            for _ in range(layer.inverse_iterations):
                z = z @ (13 * identity - a @ z @ (15 * identity - a @ z @ (7 * identity - a @ z))) / 4
            looks = (q[b] @ k_means.mT / root).softmax(-1)
            gathers = (q_means @ k[b][:, real].mT / root).softmax(-1)
            mixed = looks @ z @ (gathers @ v[b][:, real])
        if layer.value_conv is not None:
            filters, half = layer.value_conv.weight[:, 0], layer.value_conv.weight.shape[2] // 2
            near = [[filters[:, s - t + half] * v[b][:, s] for s in real if abs(s - t) <= half] for t in range(tokens)]
            mixed = mixed + torch.stack([sum(terms, torch.zeros_like(v[b][:, 0])) for terms in near], 1)
        rows.append(mixed)
    return joined(layer, torch.stack(rows))


# Two of the eight ways to combine padding, rotation and grouped heads: none of them, and all.
@pytest.mark.parametrize("tokens", [1, 2, 7, 129])
@pytest.mark.parametrize(("padded", "rotated", "heads"), [(False, False, "all heads"), (True, True, "grouped")])
def test_values_and_gradients(heads: str, rotated: bool, padded: bool, tokens: int) -> None:
    contract.assert_is(made(**HEADS[heads]), reference, tokens=tokens, padded=padded, rotated=rotated)


@pytest.mark.parametrize(("tokens", "padded"), MEMORY_CASES)
def test_a_memory(tokens: int, padded: bool) -> None:
    layer = made(num_kv_heads=2, inverse_iterations=3)
    contract.assert_is(layer, reference, tokens=tokens, memory=MEMORY, padded=padded)


@pytest.mark.parametrize(("padded", "heads"), [(False, "all heads"), (True, "grouped")])
def test_with_a_convolution_of_the_values(padded: bool, heads: str) -> None:
    layer = made(conv_kernel_size=5, num_landmarks=4, inverse_iterations=2, **HEADS[heads])
    contract.assert_is(layer, reference, tokens=7, padded=padded)
