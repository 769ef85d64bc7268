from typing import Any

import torch
from torch import Tensor, nn

from fuselayers._torch.dispatch import FakeTensor
from fuselayers.partition import fuse
from fuselayers.partition.fake_twins import fake_twins


def test_a_twin_computes_shapes_and_leaves_the_original_alone() -> None:
    layer, x = nn.BatchNorm1d(3), torch.randn(5, 3, requires_grad=True)
    with fake_twins(layer, (x,), {}) as (twin, (fake_x,), *_):
        out = twin(fake_x)
        assert isinstance(out, FakeTensor)
        assert out.shape == (5, 3)
        assert out.requires_grad
    assert layer.num_batches_tracked == 0


def test_what_is_fused_or_compiled_inside_runs_eagerly() -> None:
    """Compiled code reads memory, of which a fake tensor has none: it would crash the process."""
    fused = fuse(nn.Linear(4, 4), backend="inductor", fallback=())
    fused(torch.randn(2, 4)).sum().backward()
    holder = nn.Sequential(fused, torch.compile(nn.Linear(4, 4)))
    with fake_twins(holder, (torch.randn(2, 4),), {}) as (twin, args, *_):
        assert twin(*args).shape == (2, 4)


def test_closures_and_keywords_have_twins_too() -> None:
    weight = torch.randn(3, 7)

    def scaled(x: Tensor, *, factors: dict[str, Tensor]) -> Tensor:
        return x @ weight * factors["a"]

    with fake_twins(scaled, (torch.randn(2, 3),), {"factors": {"a": torch.ones(7, device="meta")}}) as (
        twin,
        args,
        kw,
        _,
    ):
        out = twin(*args, **kw)
    assert isinstance(out, FakeTensor)
    assert (out.shape, out.device.type) == ((2, 7), "cpu")


def test_a_container_has_one_twin_too_even_one_that_holds_itself() -> None:
    weight = torch.randn(3)
    held: list[Any] = [weight]
    held.append(held)
    named = {"one": held, "same": held}
    with fake_twins(lambda *values: values, (held, held, named), {}) as (_, (first, second, both), *_):
        assert first is second
        assert first is both["one"]
        assert first is both["same"]
        assert first[1] is first
        assert first[0] is not weight
        assert first[0].shape == (3,)
    assert held[0] is weight
