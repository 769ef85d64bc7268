import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fuselayers.partition import PartitionError, fuse
from fuselayers.partition.inspect.capture import CapturedGraph, capture
from tests.partition.tracing import ops_of


class Block(nn.Module):
    """A module with weights, buffers that forward writes to, and a Python attribute that it counts up."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, **options)
        self.norm = nn.BatchNorm1d(16, **options)
        self.down = nn.Linear(16, 8, **options)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(self.down(F.gelu(self.norm(self.up(x)))), 0.5, self.training)


def values(graph: CapturedGraph) -> list[tuple[Any, Any, Any]]:
    """Shape, dtype and device of every tensor in the graph."""
    tensors = [node.meta.get("val") for node in graph.module.graph.nodes]
    return [(tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors if isinstance(tensor, Tensor)]


def split_by_a_break(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).sin()
    torch._dynamo.graph_break()
    return (hidden @ weight).cos().cos()


class TestGraphs:
    @pytest.mark.parametrize("backend", ["eager", "inductor"])
    def test_is_what_the_partitioner_of_fuse_receives(self, backend: str) -> None:
        seen: list[Any] = []

        def look(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
            seen.append((copy.deepcopy(joint_module), options))
            raise PartitionError("seen")  # nothing is compiled then

        block, x = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 8)), torch.randn(4, 8)
        with pytest.raises(PartitionError, match=r"^seen$"):
            fuse(block, backend=backend, partition=look, fallback=())(x)
        ((module, options),) = seen
        (graph,) = capture(block, x, backend=backend)
        assert str(graph.module.graph) == str(module.graph)
        assert graph.num_forward_outputs == options["num_fwd_outputs"]
        assert list(graph.static_input_indices) == list(options["static_lifetime_input_indices"])

    def test_a_graph_break_makes_two(self) -> None:
        x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        first, second = capture(split_by_a_break, x, weight, backend="eager")
        assert "sin" in ops_of(first.module)
        assert "sin" not in ops_of(second.module)[: ops_of(second.module).index("cos")]

    def test_nothing_that_requires_grad_is_no_graph(self) -> None:
        assert capture(torch.sin, torch.randn(4)) == ()
        x = torch.randn(4, requires_grad=True)
        with torch.no_grad():
            assert capture(torch.sin, x) == ()
        assert len(capture(torch.sin, x)) == 1


class TestWhatIsGiven:
    def test_real_fake_and_meta_make_the_same_graph(self) -> None:
        with FakeTensorMode():
            fake, fake_x = Block(), torch.randn(4, 8)
        (real,) = capture(Block(), torch.randn(4, 8), backend="eager")
        (meta,) = capture(Block(device="meta"), torch.randn(4, 8, device="meta"), backend="eager")
        (faked,) = capture(fake, fake_x, backend="eager")
        (mixed,) = capture(Block(), fake_x, backend="eager")
        assert values(real) == values(meta) == values(faked) == values(mixed)
        assert ops_of(real.module) == ops_of(meta.module) == ops_of(faked.module) == ops_of(mixed.module)
        assert {device for _, _, device in values(meta)} == {torch.device("cpu")}

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_function_that_closes_over_a_module_and_a_tensor(self, device: str) -> None:
        block, weight = Block(device=device), torch.randn(8, requires_grad=True, device=device)

        def loss(x: Tensor) -> Tensor:
            return (block(x) * weight).sum()

        (graph,) = capture(lambda x: loss(x) * 2, torch.randn(4, 8, device=device), backend="eager")
        assert {device for _, _, device in values(graph)} == {torch.device("cpu")}
        assert block.calls == 0
        gradients = next(node for node in graph.module.graph.nodes if node.op == "output").args[0][1:]
        assert sum(gradient is not None for gradient in gradients) == 1 + len(list(block.parameters()))

    def test_a_fused_one_is_what_it_fuses(self) -> None:
        block, x = Block(), torch.randn(4, 8)
        (plain,) = capture(block, x, backend="eager")
        (fused,) = capture(fuse(block, backend="eager"), x, backend="eager")
        (function,) = capture(fuse(lambda x: block(x), backend="eager"), x, backend="eager")
        (inside,) = capture(nn.Sequential(fuse(block, backend="eager")), x, backend="eager")
        assert ops_of(plain.module) == ops_of(fused.module) == ops_of(function.module) == ops_of(inside.module)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_device_that_is_not_here(self) -> None:
        with pytest.raises(
            ValueError, match=r"^capture needs a cuda device to trace backward for one, and there is no"
        ):
            capture(Block(device="meta"), torch.randn(4, 8, device="meta"), device="cuda")


class TestNothingIsTouched:
    def test_the_module_and_the_configuration(self) -> None:
        block = Block()
        configs = (dynamo_config, functorch_config, inductor_config)
        configured = [config.save_config_portable() for config in configs]
        before = {name: (id(value), value.clone()) for name, value in block.state_dict(keep_vars=True).items()}
        capture(block, torch.randn(4, 8), backend="inductor")
        for name, value in block.state_dict(keep_vars=True).items():
            assert id(value) == before[name][0]
            assert torch.equal(value, before[name][1])
        assert block.calls == 0
        assert not isinstance(block.up.weight, FakeTensor)
        assert [config.save_config_portable() for config in configs] == configured

    def test_what_an_argument_holds(self) -> None:
        def fn(x: Tensor, seen: list[Tensor], counts: Tensor) -> Tensor:
            seen.append(x)
            counts.add_(1)
            return x.sin()

        seen: list[Tensor] = []
        counts = torch.zeros(3)
        capture(fn, torch.randn(3, requires_grad=True), seen, counts)
        assert seen == []
        assert counts.tolist() == [0, 0, 0]

    def test_random_state(self) -> None:
        def fn(x: Tensor) -> Tensor:
            noise = torch.rand(4) * random.random()
            torch._dynamo.graph_break()
            torch.manual_seed(7)
            return F.dropout(x, 0.5) + noise + torch.rand(4) * random.random()

        x, states = torch.ones(4, requires_grad=True), (torch.get_rng_state(), random.getstate())
        capture(fn, x, backend="eager")
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]


def decides_on_a_value(x: Tensor) -> Tensor:
    if x.sum() > 0:
        return x.sin()
    return x.cos()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: capture(3), TypeError, r"^capture takes a function or a module, got int$"),  # type: ignore[arg-type]
        (
            lambda: capture(torch.sin, torch.ones(2), backend="inducter"),
            ValueError,
            r"^no backend 'inducter'; did you mean 'inductor'\? there are: eager, inductor, nvfuser, triton$",
        ),
        (
            lambda: capture(decides_on_a_value, torch.ones(2, requires_grad=True)),
            ValueError,
            r"^decides_on_a_value needs the value of a tensor outside any graph \(aten._local_scalar_dense.default, "
            r".*test_capture.py:\d+\), and a fake tensor has none; compute it in the graph, or capture the part before",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
