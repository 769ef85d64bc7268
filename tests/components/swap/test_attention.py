from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fuselayers import ops
from fuselayers.components.swap.seeded_attention import Attention, seeded_attention
from fuselayers.partition import saved_bytes


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    shapes = ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6))
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


MASKS = {
    "none": lambda: None,
    "boolean": lambda: torch.arange(7).expand(2, 1, 5, 7) < torch.tensor([0, 1, 2, 7, 7]).view(5, 1),
    "added": lambda: torch.randn(1, 3, 5, 7, dtype=torch.float64),
    "infinite": lambda: torch.zeros(5, 7, dtype=torch.float64).index_fill(0, torch.tensor([1]), float("-inf")),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_as_torch_with_the_same_elements_dropped(mask: str, causal: bool) -> None:
    if causal and mask != "none":
        pytest.skip("torch takes one of both")
    q, k, v = tensors(torch.float64)
    given, seed = MASKS[mask](), torch.tensor(3)
    out = seeded_attention(Attention(q, k, v, given, 0.3, causal), seed=seed)
    kept = ops.dropout(torch.ones(2, 3, 5, 7, dtype=torch.float64), 0.3, seed=seed)
    assert 0.1 < (kept == 0).float().mean() < 0.5
    # Without values that differ torch gives the weights themselves.
    weights = F.scaled_dot_product_attention(
        q, k, torch.eye(7, dtype=torch.float64).expand(2, 3, 7, 7), given, 0.0, causal
    )
    expected = (weights * kept) @ v
    torch.testing.assert_close(out, expected)
    dy = torch.randn_like(out)
    for got, wanted in zip(
        torch.autograd.grad(out, (q, k, v), dy), torch.autograd.grad(expected, (q, k, v), dy), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_the_gradient_of_the_mask() -> None:
    q, k, v = tensors(torch.float64)
    mask = torch.randn(1, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    seed = torch.tensor(5)
    assert torch.autograd.gradcheck(lambda *some: seeded_attention(Attention(*some, 0.3), seed=seed), (q, k, v, mask))


def test_it_saves_no_weights() -> None:
    q, k, v = (torch.randn(2, 2, 16, 4, requires_grad=True) for _ in range(3))
    assert saved_bytes(seeded_attention, Attention(q, k, v, None, 0.1)) == 3 * 2 * 2 * 16 * 4 * 4 + 8


def test_it_is_one_op_for_a_compiler() -> None:
    q, k, v = tensors()
    torch.library.opcheck(
        torch.ops.fuselayers.seeded_attention.default, (q, k, v, None, torch.tensor(3), 0.3, False, 0.5)
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"dropout_p": 0.0},
        {"enable_gqa": True},
        {"is_causal": True, "attn_mask": torch.zeros(5, 7)},
        {"attn_mask": torch.zeros(5, 7, dtype=torch.float64)},
        {"attn_mask": torch.zeros(4, 1, 1, 5, 7)},
    ],
    ids=str,
)
def test_calls_that_are_left_to_torch(changed: dict[str, Any]) -> None:
    q, k, v = tensors()
    assert Attention(q, k, v, dropout_p=0.1).drops_here()
    assert not Attention(q, k, v, **{"dropout_p": 0.1, **changed}).drops_here()
    assert not Attention(q.bfloat16(), k, v, dropout_p=0.1).drops_here()
    with torch.autocast("cpu"):
        assert not Attention(q, k, v, dropout_p=0.1).drops_here()
