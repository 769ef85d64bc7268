from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers.components.attention.kernels import Kernel, attend
from fuselayers.components.attention.masks import Rules, check_mask
from tests.selection import every_value

SHAPES = [(), (7,), (1,), (5, 7), (5, 1), (6, 5, 7), (6, 1, 1), (2, 1, 1, 7), (1, 1, 5, 1), (2, 1, 1, 1)]
BESIDES = [(), ("bias",), ("sinks",), ("bias", "sinks")]


@pytest.mark.parametrize(
    ("kernel", "shape", "besides"),
    # Flex traces each of them.
    [*product(("sdpa", "plain"), SHAPES, BESIDES), *every_value(("flex",), SHAPES, BESIDES)],
    ids=str,
)
@torch.no_grad()
def test_a_mask_of_any_shape_is_as_if_written_out(
    kernel: Kernel, shape: tuple[int, ...], besides: tuple[str, ...]
) -> None:
    q = torch.randn(2, 6, 5, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 7, 4, dtype=torch.float64)
    rules = Rules(
        scale=0.5,
        sinks_H=torch.randn(6, dtype=torch.float64) if "sinks" in besides else None,
        bias_HTS=torch.randn(6, 5, 7, dtype=torch.float64) if "bias" in besides else None,
    )
    for mask in (torch.rand(shape) > 0.4, torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)):
        check_mask(mask, (2, 6, 5, 7), kernel=kernel)
        whole = mask.expand(2, 6, 5, 7)
        scores = 0.5 * q @ k.repeat_interleave(3, dim=1).mT + (0 if rules.bias_HTS is None else rules.bias_HTS)
        shares = scores.exp() * whole
        sink = 0 if rules.sinks_H is None else rules.sinks_H.exp()[:, None, None]
        total = shares.sum(-1, keepdim=True) + sink
        expected = shares / torch.where(total > 0, total, 1) @ v.repeat_interleave(3, dim=1)
        got = attend(q, k, v, rules._replace(mask=mask), kernel=kernel, p=0.0)
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("groups", [6, 2, 1])
@torch.no_grad()
def test_written_out_it_copies_no_keys(groups: int) -> None:
    # Many keys of one query: what is made besides must be less than one copy of the keys.
    q, k = torch.randn(1, 6, 1, 64), torch.randn(1, groups, 512, 64)
    most = 0

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal most
            made = func(*args, **(kwargs or {}))
            if made.untyped_storage().data_ptr() != k.untyped_storage().data_ptr():
                most = max(most, made.untyped_storage().nbytes())
            return made

    with Largest():
        attend(q, k, k, Rules(scale=1.0), kernel="plain", p=0.0)
    assert 0 < most < k.nbytes
