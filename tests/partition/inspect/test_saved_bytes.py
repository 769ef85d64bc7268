import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from fuselayers.partition import fuse, saved_bytes


def test_counts_each_storage_once() -> None:
    x = torch.randn(8, 16, requires_grad=True)
    assert saved_bytes(lambda x: x.sin() * x.cos().view(16, 8).view(8, 16), x) == 3 * 512


def test_parameters_do_not_count() -> None:
    layer = nn.Linear(16, 4)
    x = torch.randn(8, 16)
    assert saved_bytes(layer, x) == x.numel() * 4
    assert saved_bytes(lambda x: layer(x), x, parameters=layer.parameters()) == x.numel() * 4
    assert saved_bytes(fuse(layer, backend="eager"), x) == x.numel() * 4


def test_nothing_to_save() -> None:
    assert saved_bytes(torch.sin, torch.randn(4)) == 0


def test_the_graph_of_a_counted_call_is_freed() -> None:
    made: list[weakref.ref[Tensor]] = []

    def exponents(x: Tensor) -> Tensor:
        y = x.exp()  # its node saves y, its own output
        made.append(weakref.ref(y))
        return y.sum()

    saved_bytes(exponents, torch.randn(4, requires_grad=True))
    gc.collect()
    assert [y() for y in made] == [None, None]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_dynamo_does_not_trace_the_hooks_after_a_graph_break() -> None:
    layer = nn.GRU(4, 4)  # Dynamo leaves its op to eager mode
    x = torch.randn(2, 3, 4, requires_grad=True)
    assert saved_bytes(fuse(layer, backend="eager", fallback=()), x) > 0
