"""torch's attention becomes the library's in fused graphs on a CPU: the same numbers, and no weights saved."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers import ops
from fuselayers.ops.cpu import has_kernels
from fuselayers.ops.implementations.launch import INTERPRETED
from fuselayers.partition import capture, fuse, saved_bytes

pytestmark = pytest.mark.skipif(INTERPRETED or not has_kernels(), reason="no kernels in C++")

SHAPE = (2, 4, 100, 32)


def heads(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attention(q: Tensor, k: Tensor, v: Tensor, *mask: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, *mask, **options).sin()


def targets(fn: Any, *inputs: Tensor, **options: Any) -> list[str]:
    (graph,) = capture(partial(fn, **options), *inputs)
    return [str(node.target) for node in graph.module.graph.nodes if "attention" in str(node.target)]


OURS = ["fuselayers.attention_forward.default", "fuselayers.attention_backward.default"]
TORCH = [f"aten._scaled_dot_product_flash_attention_for_cpu{end}.default" for end in ("", "_backward")]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ((SHAPE,) * 3, {"is_causal": True}),
        ((SHAPE, (2, 2, 130, 32), (2, 2, 130, 24)), {"enable_gqa": True, "scale": 0.3}),
        ((*(SHAPE,) * 3, (4, 100, 100)), {}),
        (((4, 200, 64),) * 3, {}),
    ],
    ids=str,
)
def test_same_numbers(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any], backend: str) -> None:
    inputs = heads(*shapes)
    fused = fuse(partial(attention, **options), backend=backend, fallback=())
    assert targets(attention, *inputs, **options) == OURS
    outs = [fn(*inputs, **more) for fn, more in ((attention, options), (fused, {}))]
    torch.testing.assert_close(*outs)
    torch.testing.assert_close(*(torch.autograd.grad(out.sum(), inputs) for out in outs), rtol=1e-4, atol=1e-5)


def test_dropout_saves_a_seed_and_has_the_masks_of_the_op() -> None:
    q, k, v = heads(SHAPE, SHAPE, SHAPE)
    fused = fuse(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), backend="eager", fallback=())
    torch.manual_seed(3)
    out = fused(q, k, v)
    torch.manual_seed(3)
    torch.testing.assert_close(out, ops.attention(q, k, v, p=0.3))
    assert saved_bytes(fused, q, k, v) == 4 * (4 * q.numel() + q[..., 0].numel()) + 8


def test_torch_s_random_numbers_stay() -> None:
    q, k, v = heads(SHAPE, SHAPE, SHAPE)

    def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    outs = []
    for fn in (dropped, fuse(dropped, backend="eager", fallback=(), torch_random=True)):
        torch.manual_seed(3)
        outs.append(fn(q, k, v))
    torch.testing.assert_close(*outs)


@pytest.mark.parametrize(
    ("shapes", "dtype"),
    [(((2, 4, 9, 32),) * 3, torch.float32), (((1, 2, 20, 8),) * 3, torch.float32), ((SHAPE,) * 3, torch.float64)],
    ids=str,
)
def test_calls_in_which_torch_is_faster_or_alone(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    assert targets(attention, *heads(*shapes, dtype=dtype)) == TORCH
