"""Cross-attention of favor and nystrom. `test_options` has that of multi_head."""

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import Choice, FavorAttention, NystromAttention, TransformerBlock
from tests.components.attention.contract import HIDDEN_DIM, joined, small
from tests.components.compare import assert_same_step

KINDS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "favor": (FavorAttention, {"num_features": 5}),
    "nystrom": (NystromAttention, {"num_landmarks": 3, "inverse_iterations": 3}),
}
PADDED = torch.tensor([[True] * 9, [True] * 4 + [False] * 5, [False, True] * 4 + [False], [False] * 9])


def made(kind: str, **options: Any) -> Any:
    attention, own = KINDS[kind]
    return small(attention(HIDDEN_DIM, **{"num_heads": 6, "num_kv_heads": 2, **own, **options})).double()


def written_out(layer: Any, x: Tensor, memory: Tensor, real: Tensor | None) -> Tensor:
    """Row by row, with the padding taken out of the memory first."""
    weight, bias, size = layer.qkv.weight, layer.qkv.bias, layer.head_dim
    q_all, kv_all = (tensor @ weight.T + bias for tensor in (x, memory))
    rows = []
    for b in range(len(x)):
        at = torch.arange(memory.shape[1]) if real is None else real[b].nonzero().flatten()
        heads = []
        for h in range(6):
            g = h // 3
            q = q_all[b, :, h * size : (h + 1) * size]
            k, v = (kv_all[b, at, (6 + n * 2 + g) * size : (7 + n * 2 + g) * size] for n in (0, 1))
            heads.append(torch.zeros_like(q) if not len(at) else HEAD[type(layer)](layer, q, k, v))
        rows.append(torch.stack(heads))
    return joined(layer, torch.stack(rows))


def favor_head(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    w, scale = layer.directions, layer.head_dim**0.25
    q, k = (torch.exp(part / scale @ w.T - (part / scale).square().sum(-1, keepdim=True) / 2) for part in (q, k))
    weights = q @ k.T
    return weights @ v / weights.sum(-1, keepdim=True)


def nystrom_head(layer: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def landmarks(x: Tensor) -> Tensor:
        count = min(layer.num_landmarks, len(x))
        of = torch.tensor([number * count // len(x) for number in range(len(x))])
        return torch.stack([x[of == number].mean(0) for number in range(count)])

    root = math.sqrt(layer.head_dim)
    few_q, few_k = landmarks(q), landmarks(k)
    a = (few_q @ few_k.T / root).softmax(-1)
    z, identity = a.T / (a.sum(0).max() * a.sum(1).max()), torch.eye(len(few_q), dtype=a.dtype)
    for _ in range(layer.inverse_iterations):
        z = z @ (13 * identity - a @ z @ (15 * identity - a @ z @ (7 * identity - a @ z))) / 4
    return (q @ few_k.T / root).softmax(-1) @ z @ (few_q @ k.T / root).softmax(-1) @ v


HEAD = {FavorAttention: favor_head, NystromAttention: nystrom_head}


# The memory has 9 tokens; x has fewer or more, so that either side can be the longer.
@pytest.mark.parametrize(("tokens", "padded"), [(1, True), (7, False), (12, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients(kind: str, padded: bool, tokens: int) -> None:
    class Forward(nn.Module):
        def __init__(self, layer: nn.Module, exact: bool) -> None:
            super().__init__()
            self.layer, self.exact = layer, exact

        def forward(self, both: Tensor) -> Tensor:
            x, memory = both[:, :tokens], both[:, tokens:]
            if self.exact:
                return written_out(self.layer, x, memory, real)
            return self.layer(x, memory=memory, key_padding_mask=real)

    layer, real = made(kind), PADDED if padded else None
    both = torch.randn(4, tokens + 9, HIDDEN_DIM, dtype=torch.float64)
    assert_same_step(Forward(layer, True), Forward(layer, False), both, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("kind", "options", "inputs", "text"),
    [
        ("favor", {"causal": True}, {}, "causal attention takes no memory; build it with causal=False"),
        (
            *("nystrom", {"conv_kernel_size": 3}, {}),
            "attention with a convolution of the values takes no memory; leave conv_kernel_size out",
        ),
        ("favor", {}, {"memory": torch.zeros(1, 9, 12)}, "memory must be [4, S, 12], got [1, 9, 12]"),
        (
            *("nystrom", {}, {"key_padding_mask": torch.ones(4, 7, dtype=torch.bool)}),
            "key_padding_mask must be torch.bool [4, 9] to fit the memory [4, 9, 12], True for a real token, "
            "got torch.bool [4, 7]",
        ),
    ],
)
def test_errors_of_a_call(kind: str, options: dict[str, Any], inputs: dict[str, Any], text: str) -> None:
    layer = made(kind, **options)
    arguments = {"memory": torch.zeros(4, 9, HIDDEN_DIM), **inputs}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        layer(torch.zeros(4, 7, HIDDEN_DIM), **arguments)


def test_a_causal_block_takes_no_attention_that_mixes_queries() -> None:
    options: dict[str, Any] = {"attention": Choice("multi_head", {"num_heads": 2})}
    options["cross_attention"] = Choice("nystrom", {"num_heads": 2})
    text = (
        "cross_attention 'nystrom' mixes the queries of all tokens, so a later token would change an earlier one; "
        "use another cross_attention, such as 'multi_head'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        TransformerBlock(8, causal=True, **options)
    TransformerBlock(8, **options)  # takes it if not causal
