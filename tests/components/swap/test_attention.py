"""Attention with dropout: torch's result with the same weights dropped, and a saved seed in place of the weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers import ops
from fuselayers._torch.tracing import aot_autograd, boxed
from fuselayers.components.swap import swap
from fuselayers.partition import saved_bytes


class OwnAttention(nn.Module):
    """[B, H, T, C] and [B, H, S, C]."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.dropout, self.options = 0.3, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(
            query=q, key=k, value=v, **{"attn_mask": mask, "dropout_p": self.dropout * self.training, **self.options}
        )


def swapped(**options: Any) -> nn.Module:
    module = OwnAttention(**options)
    swap(module, level="layers", verify=False).require("attention")
    return module


def tensors() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, length, 4).requires_grad_() for length in (5, 7, 7)]


MASKS = {
    "none": lambda: None,
    "boolean": lambda: torch.arange(7).expand(2, 1, 5, 7) < torch.tensor([0, 1, 2, 7, 7]).view(5, 1),
    "added": lambda: torch.randn(1, 3, 5, 7, requires_grad=True),
    "infinite": lambda: torch.zeros(5, 7).index_fill(0, torch.tensor([1]), float("-inf")),
}


# Each kind of mask has its own branch. A causal mask is a flag, no tensor.
@pytest.mark.parametrize(("mask", "causal"), [*((name, False) for name in MASKS), ("none", True)])
def test_as_torch_with_the_same_elements_dropped(mask: str, causal: bool) -> None:
    (q, k, v), attn_mask, module = tensors(), MASKS[mask](), swapped(is_causal=causal)
    scale = ops.dropout(torch.ones(64), 0.3).max()  # about 1 / 0.7: the probability has few bits
    torch.manual_seed(3)
    out = module(q, k, v, attn_mask)
    # With the identity as values, the result is the weights.
    identity = torch.eye(7).expand(2, 3, 7, 7)
    torch.manual_seed(3)
    kept = (module(q, k, identity, attn_mask) != 0) * scale
    weights = F.scaled_dot_product_attention(q, k, identity, attn_mask, is_causal=causal)
    expected = (weights * kept) @ v
    torch.testing.assert_close(out, expected)
    inputs = [x for x in (q, k, v, attn_mask) if x is not None and x.requires_grad]
    dy = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, dy), torch.autograd.grad(expected, inputs, dy))


def test_it_saves_no_weights() -> None:
    """Saved: q, k, v, the result, a number for each query, and a seed."""
    q, k, v = tensors()
    assert saved_bytes(swapped(), q, k, v) == sum(x.numel() for x in (q, k, v, q, q[..., 0])) * 4 + 8


@pytest.mark.parametrize(
    "options",
    [{"dropout_p": 1.0}, {"attn_mask": torch.zeros(5, 7, dtype=torch.float64), "dropout_p": 0.0}],
    ids=lambda options: next(iter(options)),
)
def test_calls_that_are_left_to_torch(options: dict[str, Any]) -> None:
    results = []
    for module in (OwnAttention(**options), swapped(**options)):
        inputs = [x.double() if options.get("attn_mask") is not None else x for x in tensors()]
        torch.manual_seed(3)
        results.append(module(*inputs))
    assert torch.equal(*results)


def test_it_is_one_op_for_a_compiler() -> None:
    inputs, module = tensors(), swapped()
    targets: list[Any] = []

    def compiler(graph_module: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(node.target for node in graph_module.graph.nodes)
        return boxed(graph_module)

    torch.compile(module, backend=aot_autograd(fw_compiler=compiler))(*inputs).sum().backward()
    ops = torch.ops.fuselayers
    assert [targets.count(op.default) for op in (ops.attention_forward, ops.attention_backward)] == [1, 1]


class PackedAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_compiled_and_exported_with_methods_of_tensors_that_are_written_in_python() -> None:
    module, x = PackedAttention(), torch.randn(2, 5, 24)
    swap(module, level="layers", verify=False).require("attention")
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    for call in (compiled, torch.export.export(module, (x,), strict=True).module()):
        torch.testing.assert_close(call(x), PackedAttention()(x))
