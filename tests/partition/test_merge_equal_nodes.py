import torch
import torch.fx as fx
from torch.fx.experimental.proxy_tensor import make_fx

from fuselayers.ops import draw_seed
from fuselayers.partition.merge_equal_nodes import merge_equal_nodes


def merged(fn: object, *args: torch.Tensor) -> tuple[fx.GraphModule, list[str]]:
    module = merge_equal_nodes(make_fx(fn, tracing_mode="fake")(*args))
    return module, [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def test_equal_calls_become_one() -> None:
    x = torch.randn(4)
    module, calls = merged(lambda x: (x.sin() * 2 + x.sin() * 2) * 1.5, x)
    assert calls.count("aten.sin.default") == 1
    assert calls.count("aten.mul.Tensor") == 2
    torch.testing.assert_close(module(x), (x.sin() * 4) * 1.5)


def test_other_arguments_and_other_types_stay_apart() -> None:
    _, calls = merged(lambda x: ((x + 1) * (x + 1.0) * (x + 2)).sum(), torch.randn(4))
    assert calls.count("aten.add.Tensor") == 3


def test_draws_stay_apart() -> None:
    _, calls = merged(lambda x: (x * draw_seed() * draw_seed()).sum(), torch.randn(4))
    assert calls.count("fuselayers.draw_seed.default") == 2
    _, calls = merged(lambda x: (torch.rand_like(x) * torch.rand_like(x)).sum(), torch.randn(4))
    assert calls.count("aten.rand_like.default") == 2


def test_two_outputs_stay_two_tensors() -> None:
    module, _ = merged(lambda x: (x.sin(), x.sin()), torch.randn(4))
    first, second = module(torch.randn(4))
    assert first.data_ptr() != second.data_ptr()


def test_a_graph_that_mutates_is_left_alone() -> None:
    def mutate(x: torch.Tensor) -> torch.Tensor:
        before = x.sin()
        x.add_(1)
        return (before + x.sin()).cos()

    _, calls = merged(mutate, torch.randn(4))
    assert calls.count("aten.sin.default") == 2
