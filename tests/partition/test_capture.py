import copy
import functools
import gc
import random
import resource
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter, EagerAndRecordGraphs
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from fuselayers.partition import PartitionError, fuse
from fuselayers.partition.capture import CapturedGraph, capture

BACKENDS = ["eager", "inductor"]
# For what is the same code in front of both.
one_backend = pytest.mark.parametrize("backend", [pytest.param("eager", marks=pytest.mark.slow), "inductor"])


class Block(nn.Module):
    """A module with everything that could be touched: weights, buffers that forward writes to, a Python attribute."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16, **options)
        self.norm = nn.BatchNorm1d(16, **options)
        self.down = nn.Linear(16, 8, **options)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return F.dropout(self.down(F.gelu(self.norm(self.up(x)))), 0.5, self.training)


def ops(graph: CapturedGraph) -> list[str]:
    return [str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"]


def values(graph: CapturedGraph) -> list[tuple[Any, Any, Any]]:
    """Shape, dtype and device of every tensor in the graph."""
    found = [node.meta.get("val") for node in graph.module.graph.nodes]
    return [(tuple(one.shape), one.dtype, one.device) for one in found if isinstance(one, Tensor)]


def split_by_a_break(x: Tensor, weight: Tensor) -> Tensor:
    hidden = (x @ weight).sin()
    torch._dynamo.graph_break()
    return (hidden @ weight).cos().cos()


class TestGraphs:
    @pytest.mark.parametrize("backend", BACKENDS)
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

    def test_inductor_decomposes_and_eager_does_not(self) -> None:
        x = torch.randn(4, 8, requires_grad=True)
        (eager,), (inductor,) = (capture(F.gelu, x, backend=backend) for backend in BACKENDS)
        assert ops(eager) == ["aten.gelu.default", "aten.gelu_backward.default"]
        assert "aten.erf.default" in ops(inductor)
        assert not [op for op in ops(inductor) if "gelu" in op]

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_graph_break_makes_two(self, backend: str) -> None:
        x, weight = torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
        first, second = capture(split_by_a_break, x, weight, backend=backend)
        assert "aten.sin.default" in ops(first)
        assert "aten.sin.default" not in ops(second)[: ops(second).index("aten.cos.default")]

    def test_fullgraph_raises_what_dynamo_says(self) -> None:
        x = torch.randn(8, 8, requires_grad=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
            capture(split_by_a_break, x, x, fullgraph=True)

    def test_nothing_that_requires_grad_is_no_graph(self) -> None:
        assert capture(torch.sin, torch.randn(4)) == ()
        x = torch.randn(4, requires_grad=True)
        with torch.no_grad():
            assert capture(torch.sin, x) == ()
        assert len(capture(torch.sin, x)) == 1

    def test_a_part_without_backward_is_left_out(self) -> None:
        def fn(x: Tensor, weight: Tensor) -> Tensor:
            y = x.exp()
            torch._dynamo.graph_break()
            return (y * weight).sin()

        (graph,) = capture(fn, torch.randn(4), torch.randn(4, requires_grad=True), backend="eager")
        assert "aten.exp.default" not in ops(graph)


class TestWhatIsGiven:
    @one_backend
    def test_real_fake_and_meta_make_the_same_graph(self, backend: str) -> None:
        with FakeTensorMode():
            fake, fake_x = Block(), torch.randn(4, 8)
        (real,) = capture(Block(), torch.randn(4, 8), backend=backend)
        (meta,) = capture(Block(device="meta"), torch.randn(4, 8, device="meta"), backend=backend)
        (faked,) = capture(fake, fake_x, backend=backend)
        (mixed,) = capture(Block(), fake_x, backend=backend)
        assert values(real) == values(meta) == values(faked) == values(mixed)
        assert ops(real) == ops(meta) == ops(faked) == ops(mixed)
        assert {device for _, _, device in values(meta)} == {torch.device("cpu")}

    def test_inside_a_fake_mode(self) -> None:
        with FakeTensorMode() as mode:
            (graph,) = capture(Block(), torch.randn(4, 8), backend="eager")
            assert torch.empty(2).fake_mode is mode
        assert "aten.gelu.default" in ops(graph)

    def test_strides_dtype_and_tied_weights_of_meta_tensors(self) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(10, 8, device="meta", dtype=torch.bfloat16)
                self.head = nn.Linear(8, 10, bias=False, device="meta", dtype=torch.bfloat16)
                self.head.weight = self.embed.weight

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.embed(tokens))

        (graph,) = capture(Tied(), torch.zeros(2, 3, dtype=torch.int64, device="meta").t(), backend="eager")
        placeholders = [node.meta["val"] for node in graph.module.graph.nodes if node.op == "placeholder"]
        described = [(tuple(one.shape), one.stride(), one.dtype) for one in placeholders[:2]]
        assert sorted(described, key=str) == [
            ((10, 8), (8, 1), torch.bfloat16),
            ((3, 2), (1, 3), torch.int64),
        ]
        assert len(placeholders) == 3

    def test_nested_arguments_and_python_values(self) -> None:
        def fn(batch: dict[str, list[Tensor]], *, power: int, name: str) -> Tensor:
            assert name == "loss"
            return batch["x"][0] ** power

        (graph,) = capture(
            fn, {"x": [torch.randn(4, device="meta", requires_grad=True)]}, power=3, name="loss", backend="eager"
        )
        (power,) = [node for node in graph.module.graph.nodes if str(node.target) == "aten.pow.Tensor_Scalar"][:1]
        assert power.args[1] == 3

    def test_a_list_that_holds_itself(self) -> None:
        held: list[Any] = [torch.randn(4, requires_grad=True)]
        held.append(held)
        (graph,) = capture(lambda one, same: one[1][0].sin() * same["held"][0], held, {"held": held}, backend="eager")
        assert sum(node.op == "placeholder" for node in graph.module.graph.nodes) == 2  # one tensor and the gradient

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_a_function_that_closes_over_a_module_and_a_tensor(self, device: str) -> None:
        block, weight = Block(device=device), torch.randn(8, requires_grad=True, device=device)

        def loss(x: Tensor) -> Tensor:
            return (block(x) * weight).sum()

        (graph,) = capture(lambda x: loss(x) * 2, torch.randn(4, 8, device=device), backend="eager")
        assert {device for _, _, device in values(graph)} == {torch.device("cpu")}
        assert block.calls == 0
        gradients = next(node for node in graph.module.graph.nodes if node.op == "output").args[0][1:]
        assert sum(one is not None for one in gradients) == 1 + len(list(block.parameters()))

    def test_a_function_of_a_global_module(self) -> None:
        (graph,) = capture(of_global, torch.randn(4, 8), backend="eager")
        assert ops(graph)[:2] == ["aten.t.default", "aten.addmm.default"]
        assert GLOBAL.weight.is_meta

    def test_methods_and_partial_functions(self) -> None:
        block = Block(device="meta")
        (method,) = capture(block.forward, torch.randn(4, 8), backend="eager")
        (bound,) = capture(functools.partial(F.linear, weight=block.up.weight), torch.randn(4, 8), backend="eager")
        assert "aten.gelu.default" in ops(method)
        assert ops(bound) == [f"aten.{name}.default" for name in ("t", "mm", "t", "mm", "t", "t")]
        assert block.calls == 0

    def test_a_recursive_function(self) -> None:
        weight = torch.randn(4, device="meta", requires_grad=True)

        def powers(x: Tensor, times: int) -> Tensor:
            return x if times == 0 else powers(x * weight, times - 1)

        (graph,) = capture(powers, torch.randn(4), 3, backend="eager")
        assert ops(graph)[:3] == ["aten.mul.Tensor"] * 3

    @one_backend
    def test_a_fused_one_is_what_it_fuses(self, backend: str) -> None:
        block, x = Block(), torch.randn(4, 8)
        (plain,) = capture(block, x, backend=backend)
        (fused,) = capture(fuse(block, backend="eager"), x, backend=backend)
        (function,) = capture(fuse(lambda x: block(x), backend="eager"), x, backend=backend)
        (inside,) = capture(nn.Sequential(fuse(block, backend="eager")), x, backend=backend)
        assert ops(plain) == ops(fused) == ops(function) == ops(inside)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_a_device_that_is_not_here(self) -> None:
        with pytest.raises(
            ValueError, match=r"^capture needs a cuda device to trace backward for one, and there is no"
        ):
            capture(Block(device="meta"), torch.randn(4, 8, device="meta"), device="cuda")

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_meta_tensors_taken_to_be_on_the_gpu(self) -> None:
        (graph,) = capture(Block(device="meta"), torch.randn(4, 8, device="meta"), device="cuda")
        assert {device.type for _, _, device in values(graph)} == {"cuda"}


GLOBAL = nn.Linear(8, 2, device="meta")


def of_global(x: Tensor) -> Tensor:
    return GLOBAL(x)


class TestNothingIsTouched:
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_the_module(self, backend: str) -> None:
        block = Block()
        before = {name: (id(value), value.clone()) for name, value in block.state_dict(keep_vars=True).items()}
        capture(block, torch.randn(4, 8), backend=backend)
        for name, value in block.state_dict(keep_vars=True).items():
            assert id(value) == before[name][0]
            assert torch.equal(value, before[name][1])
        assert block.calls == 0
        assert not isinstance(block.up.weight, FakeTensor)

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

    @one_backend
    def test_random_state(self, backend: str) -> None:
        def fn(x: Tensor) -> Tensor:
            noise = torch.rand(4) * random.random()
            torch._dynamo.graph_break()
            torch.manual_seed(7)
            return F.dropout(x, 0.5) + noise + torch.rand(4) * random.random()

        torch.manual_seed(3)
        random.seed(3)
        expected = torch.rand(4), random.random()
        torch.manual_seed(3)
        random.seed(3)
        capture(fn, torch.randn(4).requires_grad_(), backend=backend)
        torch.manual_seed(3)
        capture(fn, torch.ones(4, requires_grad=True), backend=backend)
        assert torch.equal(torch.rand(4), expected[0])
        assert random.random() == expected[1]

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_configuration(self, backend: str) -> None:
        configs = (dynamo_config, functorch_config, inductor_config)
        before = [config.save_config_portable() for config in configs]
        capture(Block(), torch.randn(4, 8), backend=backend)
        assert [config.save_config_portable() for config in configs] == before

    def test_a_later_compile_of_the_same_function(self) -> None:
        x = [torch.randn(size, size, requires_grad=True) for size in (4, 6, 8)]
        for one in x[:2]:
            capture(split_by_a_break, one, one)
        recorder = EagerAndRecordGraphs()
        torch.compile(split_by_a_break, backend=recorder)(x[2], x[2])
        assert first_sizes(recorder) == [(8, 8)] * 2

    def test_an_earlier_compile_of_the_same_function(self) -> None:
        x = torch.randn(4, 4, requires_grad=True)
        counter = CompileCounter()
        compiled = torch.compile(split_by_a_break, backend=counter)
        compiled(x, x)
        capture(split_by_a_break, x, x)
        compiled(x, x)
        assert counter.frame_count == 2

    def test_the_globals_of_the_function(self) -> None:
        x = torch.randn(4, 4, requires_grad=True)
        before = set(split_by_a_break.__globals__)
        capture(split_by_a_break, x, x)
        left = set(split_by_a_break.__globals__) - before
        # Dynamo itself never takes back the dictionary of builtins that it puts there before it meets a graph break.
        assert [name for name in left if not name.startswith("__builtins_dict__")] == []

    def test_many_captures_do_not_reach_a_limit(self) -> None:
        with dynamo_config.patch(recompile_limit=2):
            for size in range(2, 6):
                x = torch.randn(size, size, requires_grad=True)
                assert len(capture(split_by_a_break, x, x, backend="eager")) == 2

    def test_nothing_is_kept_alive(self) -> None:
        block = Block()
        (graph,) = capture(block, torch.randn(4, 8), backend="eager")
        twin = weakref.ref(graph.module)
        original = weakref.ref(block)
        del graph, block
        gc.collect()
        assert twin() is None
        assert original() is None


def first_sizes(recorder: EagerAndRecordGraphs) -> list[tuple[Any, ...]]:
    """The size of the first input of each graph; symbols in it become text, so that they equal no number."""
    inputs = [next(iter(graph.graph.nodes)).meta["example_value"] for graph in recorder.graphs]
    return [tuple(one if isinstance(one, int) else str(one) for one in value.shape) for value in inputs]


class TestSize:
    def test_a_model_of_200_billion_parameters(self) -> None:
        layers = [nn.Linear(131072, 131072, device="meta", dtype=torch.bfloat16) for _ in range(12)]
        model = nn.Sequential(*layers)
        assert sum(one.numel() for one in model.parameters()) > 200_000_000_000
        x = torch.empty(2048, 131072, device="meta", dtype=torch.bfloat16)
        capture(layers[0], x)  # what torch imports at the first capture of a process is not the model's
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
        (graph,) = capture(model, x)
        assert time.perf_counter() - start < 20
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes
        assert sum(op == "aten.mm.default" for op in ops(graph)) >= 2 * 12 - 1

    def test_a_module_on_real_memory_is_not_copied(self) -> None:
        layer = nn.utils.skip_init(nn.Linear, 32768, 32768, bias=False)  # 4 GiB that nobody has written to yet
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        (graph,) = capture(layer, torch.randn(4, 32768))
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes
        assert ((32768, 32768), torch.float32, torch.device("cpu")) in values(graph)


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
            r"^decides_on_a_value needs the value of a tensor outside of any graph \(aten._local_scalar_dense.default, "
            r".*test_capture.py:\d+\), and a fake tensor has none; compute it in the graph, or capture the part before",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
