import torch
from torch import Tensor, fx
from torch.utils.checkpoint import checkpoint

from fuselayers.partition.modes import Modes, holds_checkpoints, switches_modes


def graph_of(fn: object) -> fx.GraphModule:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch.compile(fn, backend=backend, fullgraph=True)(torch.ones(4, 4, requires_grad=True))  # type: ignore[call-overload]
    return graphs[0]


def in_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x @ x


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        y = x.sin()
    return x * y


def checkpointed(x: Tensor) -> Tensor:
    y: Tensor = checkpoint(torch.sin, x, use_reentrant=False)
    return y


def test_what_a_graph_does_beside_computing() -> None:
    assert [switches_modes(graph_of(fn)) for fn in (in_autocast, without_gradients, torch.sin)] == [True, True, False]
    assert [holds_checkpoints(graph_of(fn)) for fn in (checkpointed, torch.sin)] == [True, False]


def test_a_switch_within_a_checkpoint_counts() -> None:
    graph = graph_of(lambda x: checkpoint(in_autocast, x, use_reentrant=False))
    assert switches_modes(graph)
    assert holds_checkpoints(graph)


def test_modes_are_put_back() -> None:
    modes = Modes()
    torch.set_grad_enabled(False)
    torch.autocast("cpu", dtype=torch.float16, cache_enabled=False).__enter__()
    modes.restore()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16
    assert torch.is_autocast_cache_enabled()
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0
