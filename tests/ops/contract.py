"""What every op must satisfy. Each tests/ops/test_<op>.py states its cases and calls `check_op` and its kin."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselayers.partition import fuse

# A form of an op may err at most twice as much as plain torch does in the same dtype, both against float64.
SLACK = 2.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1,), (7,), (3, 5), (2, 3, 129), (1, 1025), (0, 4))

Op = Callable[..., Any]


def seed_of(number: int = 5) -> Tensor:
    return torch.tensor(number * 0x9E3779B97F4A7C15 % (1 << 63), dtype=torch.int64)


def tensors(*shapes: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Random tensors of the given shapes, exactly representable in every dtype under test."""
    generator = torch.Generator().manual_seed(0)
    # Steps of 1/32 within +-4 are exact in bfloat16 too, so that every dtype is given the same numbers.
    return [(torch.randint(-128, 129, tuple(shape), generator=generator) / 32).to(dtype) for shape in shapes]


def results(fn: Op, inputs: Sequence[Tensor], **options: Any) -> dict[str, Tensor]:
    """Outputs of `fn` and the gradient of every floating input, for a fixed random incoming gradient."""
    leaves = [value.detach().clone(memory_format=torch.preserve_format).requires_grad_() for value in inputs]
    outputs = fn(*leaves, **options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randint(-8, 9, out.shape, generator=generator).div(8).to(out.dtype) for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, incoming)
    named = {f"y{place}": out.detach() for place, out in enumerate(outputs)}
    return named | {f"d{place}": gradient for place, gradient in enumerate(gradients)}


def assert_as_good_as(form: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """`form` agrees with the float64 reference at least half as well as the reference in the inputs' own dtype does."""
    exact = results(reference, [value.double() for value in inputs], **options)
    plain = results(reference, inputs, **options)
    got = results(form, inputs, **options)
    assert got.keys() == exact.keys()
    for name, value in got.items():
        assert value.dtype == plain[name].dtype, name
        assert value.shape == plain[name].shape, name
        if not value.numel():
            continue
        error = (value.double() - exact[name]).abs().max().item()
        allowed = SLACK * (plain[name].double() - exact[name]).abs().max().item()
        allowed += torch.finfo(value.dtype).eps * exact[name].abs().max().item()
        assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"


def check_layouts(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """The op does not care how its [R, N] inputs lie in memory."""
    for relay in (
        lambda x: x.mT.contiguous().mT,
        lambda x: torch.stack([x, x], dim=1)[:, 0],
        lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
        lambda x: torch.stack([x, x], dim=-1)[..., 1],
    ):
        laid_out = [relay(value) if value.dim() > 1 else value for value in inputs]
        assert any(not value.is_contiguous() for value in laid_out)
        assert_as_good_as(op, reference, laid_out, **options)


def check_fused(op: Op, reference: Op, inputs: Sequence[Tensor], *, backend: str, **options: Any) -> None:
    """Fused in one graph, the op gives the reference's numbers, for the same seed the same mask."""
    names = tuple(name for name, value in options.items() if not isinstance(value, Tensor))
    fused = fuse(op, backend=backend, fallback=(), fullgraph=True, static_argnames=names)
    assert_as_good_as(fused, reference, inputs, **options)
    assert fused.served_by == (backend,)
