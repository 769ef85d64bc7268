"""What AOTAutograd promises about a traced function, kept by `fuse`: values, gradients, aliases and mutations as eager.

Each test names one behaviour that a compiler which only looks at values would lose.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._functorch import config as functorch_config
from torch.testing._internal.two_tensor import TwoTensor

from fuselayers.partition import fuse

# AOTAutograd works in front of every backend, so `make test` runs one of them, and Inductor where it has own passes.
pytestmark = pytest.mark.filterwarnings("error::fuselayers.partition.FallbackWarning")
both_backends = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    # Dynamo of 2.11 remembers by file, line and name which sizes changed: another test's `layer` would change ours.
    torch.compiler.reset()


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def fully_fused(fn: Any, backend: str = "eager", **options: Any) -> Any:
    return fuse(fn, backend=backend, **{"fullgraph": True, **options})


def same_as_eager(fn: Any, use: Callable[[Any], Any], backend: str = "eager", **options: Any) -> Any:
    """Give `use` the plain function and the fused one; what it returns must be the same. Returns that of the fused one.

    `use` makes its inputs by random numbers, which are the same both times.
    """
    fused = fully_fused(copy.deepcopy(fn) if isinstance(fn, nn.Module) else fn, backend, **options)
    results = []
    for call in (fn, fused):
        torch.manual_seed(1)
        results.append(use(call))
    torch.testing.assert_close(results[1], results[0])
    assert {graph.served_by for graph in fused.report().graphs} == {backend}, "it ran as plain Python"
    return results[1]


def gradients(out: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
    total = sum(part.float().square().sum() for part in (out if isinstance(out, tuple) else (out,)))
    return torch.autograd.grad(total, leaves)


def layout(value: Tensor) -> Any:
    return value.shape, value.stride(), value.storage_offset(), value.dtype, value.requires_grad


class TestInputMutation:
    # The backward of `mul_` needs x as it was before the write, that of `add_` does not.
    @pytest.mark.parametrize(
        ("backend", "partition", "op"),
        [
            ("eager", "min_cut", "mul_"),
            ("eager", "default", "mul_"),
            pytest.param("inductor", "min_cut", "add_", marks=pytest.mark.slow),
            ("inductor", "min_cut", "mul_"),
        ],
    )
    def test_data(self, backend: str, partition: str, op: str) -> None:
        def change(x: Tensor, y: Tensor) -> Tensor:
            getattr(x, op)(y)
            return x.sin()

        def use(fn: Any) -> Any:
            start, y = leaf(3, 4), leaf(4)
            x = start * 1
            address, version = x.data_ptr(), x._version
            out = fn(x, y)
            assert (x.data_ptr(), x._version > version) == (address, True)
            # The gradient goes through the mutated input and through the result.
            return x, out, gradients((out, x), start, y)

        same_as_eager(change, use, backend, partition=partition)

    @both_backends
    def test_data_without_gradients(self, backend: str) -> None:
        def running_mean(mean: Tensor, x: Tensor) -> Tensor:
            mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return x - mean

        def use(fn: Any) -> Any:
            mean, weight = torch.ones(4), leaf(4)
            outs = [fn(mean, torch.randn(5, 4)) for _ in range(3)]
            assert not torch.equal(mean, torch.ones(4))
            with torch.no_grad():  # a parameter may be written to where no gradient is recorded
                outs.append(fn(weight, torch.randn(5, 4)))
            assert weight.is_leaf
            assert weight.requires_grad
            return outs, mean, weight

        same_as_eager(running_mean, use, backend)

    # Dynamo takes these into no graph: the part before and the part after are compiled.
    @pytest.mark.parametrize(
        "change",
        [
            lambda x: x.t_(),
            lambda x: x.transpose_(0, 1),
            lambda x: x.unsqueeze_(1),
            lambda x: x.mul_(3).t_(),
        ],
        ids=["t", "transpose", "unsqueeze", "data_too"],
    )
    def test_metadata(self, change: Callable[[Tensor], Tensor]) -> None:
        def reshape(x: Tensor) -> Tensor:
            change(x)
            return x.cos()

        def use(fn: Any) -> Any:
            start = leaf(3, 4)
            x = start * 1
            out = fn(x)
            assert x.shape != start.shape
            return x, out, gradients((x, out), start), torch.tensor([*x.stride(), *out.stride()])

        same_as_eager(reshape, use, fullgraph=False)

    def test_metadata_in_one_graph_is_refused_by_name(self) -> None:
        x = torch.ones(3, 4)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="an inplace view on a graph input is not supported"):
            fully_fused(lambda x: x.t_() * 2)(x)
        assert x.shape == (3, 4)

    def test_a_leaf_under_no_grad(self) -> None:
        def clip_and_use(x: Tensor) -> Tensor:
            with torch.no_grad():
                x.clamp_(-0.5, 0.5)
            return x.square()

        def use(fn: Any) -> Any:
            x = leaf(16)
            out = fn(x)
            assert x.is_leaf
            assert x.abs().max() == 0.5
            return x, out, gradients(out, x)

        same_as_eager(clip_and_use, use)

    def test_a_leaf_that_requires_grad_is_refused_as_in_eager(self) -> None:
        def scale(x: Tensor) -> Tensor:
            return x.mul_(2) * 1

        for fn in (scale, fuse(scale, backend="eager", fallback=())):
            x = torch.ones(3, requires_grad=True)
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                fn(x)
            assert x.tolist() == [1.0] * 3


class TestAliases:
    @both_backends
    def test_a_view_of_an_input(self, backend: str) -> None:
        def column(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, 1], x + 1

        def use(fn: Any) -> Any:
            start = leaf(3, 4)
            x = start * 1
            view, other = fn(x)
            assert view._base is x
            assert view.data_ptr() == x.data_ptr() + x.element_size()
            assert other.data_ptr() != x.data_ptr()
            view.mul_(5)
            torch.testing.assert_close(x[:, 1], start[:, 1] * 5)
            return x, view, other, gradients((x, other), start), torch.tensor(view.stride())

        same_as_eager(column, use, backend)

    @both_backends
    def test_the_input_itself(self, backend: str) -> None:
        x, value = leaf(3), torch.ones(3)
        assert fully_fused(lambda x: (x, x.sin()), backend)(x)[0] is x
        assert fully_fused(lambda x: x.mul_(2), backend)(value) is value
        assert value.tolist() == [2.0, 2.0, 2.0]

    @both_backends
    def test_outputs_of_each_other(self, backend: str) -> None:
        def views(x: Tensor) -> tuple[Tensor, ...]:
            hidden = x.sin()
            return hidden, hidden.view(-1), hidden[1], hidden.t(), hidden + 1

        layouts = []

        def use(fn: Any) -> Any:
            x = leaf(3, 4)
            outs = hidden, flat, row, turned, apart = fn(x)
            assert hidden.data_ptr() == flat.data_ptr() == turned.data_ptr()
            assert row.data_ptr() == hidden.data_ptr() + 4 * hidden.element_size()
            assert apart.data_ptr() != hidden.data_ptr()
            row.mul_(3)
            torch.testing.assert_close(flat[4:8], x[1].sin() * 3)
            hidden.add_(1)
            layouts.append([layout(out) for out in outs])
            return outs, gradients((flat, apart), x)

        same_as_eager(views, use, backend)
        assert layouts[0] == layouts[1]

    def test_the_same_output_twice(self) -> None:
        first, second = fully_fused(lambda x: (x.sin(),) * 2)(leaf(3))
        assert first is second

    @both_backends
    def test_an_output_and_its_detached_twin(self, backend: str) -> None:
        def with_detached(x: Tensor) -> tuple[Tensor, Tensor]:
            out = x.sin()
            return out, out.detach()

        def use(fn: Any) -> Any:
            x = leaf(4)
            out, detached = fn(x)
            assert out is not detached
            assert (out.requires_grad, detached.requires_grad) == (True, False)
            (dx,) = torch.autograd.grad((out * detached).sum(), x)
            torch.testing.assert_close(dx, x.detach().cos() * x.detach().sin())
            return out, detached, torch.tensor(out.data_ptr() == detached.data_ptr())

        same_as_eager(with_detached, use, backend)

    def test_a_view_with_its_own_backward(self) -> None:
        class FlatWithTripledGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.view(-1)

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                return dy.view(3, 4) * 3

        def use(fn: Any) -> Any:
            start, weight = leaf(3, 4), torch.randn(12)
            x = start * 1
            out = fn(x)
            assert out.data_ptr() == x.data_ptr()
            (dx,) = torch.autograd.grad((out * weight).sum(), start)
            torch.testing.assert_close(dx, weight.view(3, 4) * 3)
            return out

        same_as_eager(lambda x: FlatWithTripledGradient.apply(x), use)

    @both_backends
    def test_overlapping_inputs(self, backend: str) -> None:
        def use(fn: Any) -> Any:
            start = leaf(10)
            storage = start * 1
            out = fn(storage[:6], storage[4:])
            torch.testing.assert_close(storage[4:6], start[4:6] * 2)
            return storage, out, gradients((out, storage), start)

        same_as_eager(change_one, use, backend)

    @pytest.mark.parametrize(
        "dynamic",
        [
            True,
            pytest.param(
                None,
                marks=pytest.mark.xfail(
                    strict=True,
                    raises=AssertionError,
                    reason="AOTAutograd guards on which inputs overlap only where their sizes are symbolic",
                ),
            ),
        ],
    )
    def test_inputs_that_overlap_only_in_the_second_call(self, dynamic: bool | None) -> None:
        def use(fn: Any) -> Any:
            storages = [torch.arange(12.0) for _ in range(3)]
            parts = slice(6, 12), slice(3, 9), slice(6, 12)
            return [fn(x[:6], x[part]) for x, part in zip(storages, parts, strict=True)], storages

        same_as_eager(change_one, use, dynamic=dynamic)

    @both_backends
    @pytest.mark.parametrize("mutates", [False, True])
    def test_the_same_input_twice(self, mutates: bool, backend: str) -> None:
        def use(fn: Any) -> Any:
            leaves, outs = [leaf(5), leaf(5)], []
            for same in (True, False, True):
                a, b = (value * 1 for value in leaves)
                out = fn(a, a if same else b)
                outs.append((out, a, b, gradients((out, a, b), *leaves)))
            return outs

        same_as_eager(change_one if mutates else lambda a, b: a.sin() * b, use, backend)


def change_one(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return a * b


@both_backends
def test_gradients_with_other_strides_than_the_output(backend: str) -> None:
    def use(fn: Any) -> Any:
        x, weight, results = leaf(8, 5), leaf(5, 6), []
        for tangent in (
            torch.randn(2, 4, 6),
            torch.randn(6, 4, 2).permute(2, 1, 0),
            torch.tensor(1.5).expand(2, 4, 6),
            torch.randn(1, 1, 6).expand(2, 4, 6),
            torch.randn(2, 4, 12)[..., ::2],
        ):
            before = tangent.clone()
            results.append(torch.autograd.grad(fn(x, weight), (x, weight), tangent))
            assert torch.equal(tangent, before)
        return results

    same_as_eager(lambda x, weight: (x @ weight).view(-1, 4, 6).sin(), use, backend)


class TestTensorSubclasses:
    @both_backends
    def test_two_tensors_in_one(self, backend: str) -> None:
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).sin() + x

        def use(fn: Any) -> Any:
            values = [torch.randn(4, 4) for _ in range(4)]
            x, weight = (TwoTensor(*pair).requires_grad_() for pair in (values[:2], values[2:]))
            out = fn(x, weight)
            parts = out, *gradients(out, x, weight)
            assert all(type(part) is TwoTensor for part in parts)
            # Both halves are really computed: each is what its own plain tensors give.
            torch.testing.assert_close(out.b, layer(values[1], values[3]))
            return [half for part in parts for half in (part.a, part.b)]

        same_as_eager(layer, use, backend)

    def test_dtensor(self, one_process_mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).sin()

        placements = []

        def use(fn: Any) -> Any:
            values = torch.randn(4, 6), torch.randn(6, 8)
            x = DTensor.from_local(values[0], one_process_mesh, [Replicate()]).requires_grad_()
            weight = DTensor.from_local(values[1], one_process_mesh, [Shard(1)]).requires_grad_()
            out = fn(x, weight)
            # In eager, a tangent with other placements could give the gradients other ones too.
            out.backward(DTensor.from_local(torch.randn(4, 8), one_process_mesh, [Shard(1)]))
            parts = out, x.grad, weight.grad
            placements.append([part.placements for part in parts])
            torch.testing.assert_close(out.to_local(), layer(*values))
            return [part.to_local() for part in parts]

        same_as_eager(layer, use)
        assert placements[0] == placements[1]
        assert placements[1][0] == (Shard(1),)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="semi-structured sparsity is only for CUDA tensors")
    def test_semi_structured_sparse_weight(self) -> None:
        from torch.sparse import to_sparse_semi_structured

        mask = torch.tensor([0, 0, 1, 1]).tile((128, 32))
        weight = (torch.randn(128, 128, dtype=torch.float16) * mask).cuda()
        x = torch.randn(128, 128, dtype=torch.float16, device="cuda")
        out = same_as_eager(
            lambda x, weight: F.linear(x, weight).relu(), lambda fn: fn(x, to_sparse_semi_structured(weight))
        )
        torch.testing.assert_close(out, F.linear(x, weight).relu(), rtol=1e-2, atol=1e-2)

    @both_backends
    def test_float8_weight(self, backend: str) -> None:
        def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            return F.linear(x, weight.to(torch.float32) * scale).sin()

        def use(fn: Any) -> Any:
            x, weight, scale = leaf(4, 8), torch.randn(6, 8).to(torch.float8_e4m3fn), leaf(6, 1)
            out = fn(x, weight, scale)
            return out, gradients(out, x, scale)

        assert same_as_eager(layer, use, backend)[0].dtype == torch.float32


@pytest.fixture
def compilations(_nothing_compiled_yet: None) -> Iterator[list[None]]:
    """One element for each compilation of Dynamo and AOTAutograd, deferred backwards included."""
    from torch._dynamo.callback import callback_handler

    started: list[None] = []

    def note(*_: Any) -> None:
        started.append(None)

    callback_handler.register_start_callback(note)
    yield started
    callback_handler.remove_start_callback(note)


class TestDynamicSizes:
    @staticmethod
    def layer(x: Tensor) -> Tensor:
        return x.sin().expand(3, *x.shape).sum((1, 2)) / x.shape[0]

    @both_backends
    def test_backward_is_compiled_with_forward(self, compilations: list[None], backend: str) -> None:
        fused = fully_fused(self.layer, backend, dynamic=True)
        for size in (5, 9, 17):
            x = leaf(size, 4)
            torch.testing.assert_close(gradients(fused(x), x), gradients(self.layer(x), x))
            assert len(compilations) == 1

    def test_a_size_that_changes_becomes_symbolic(self, compilations: list[None]) -> None:
        fused = fully_fused(self.layer)
        counts = []
        for size in (5, 9, 17, 33):
            x = leaf(size, 4)
            torch.testing.assert_close(gradients(fused(x), x), gradients(self.layer(x), x))
            counts.append(len(compilations))
        assert counts[1] == counts[2] == counts[3] > counts[0]


class WithFoldableWeight(nn.Module):
    """Its weight goes through an op before it is used, which freezing does once and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.sin() * 2).relu()


@pytest.mark.parametrize("freezing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_weights_are_constants_only_with_freezing(freezing: bool) -> None:
    layer, x = WithFoldableWeight().eval(), torch.randn(3, 8)
    fused = fully_fused(layer, "inductor")
    with torch._inductor.config.patch(freezing=freezing), torch.no_grad():
        before = layer(x)
        torch.testing.assert_close(fused(x), before)
        # As torch documents: "After freezing, weights can no longer be updated."
        layer.weight.mul_(0.5)
        assert not torch.allclose(layer(x), before)
        torch.testing.assert_close(fused(x), before if freezing else layer(x))
        torch.testing.assert_close(fused(2 * x), 2 * before if freezing else layer(2 * x))


def anomaly(fn: Callable[[Tensor], Tensor]) -> tuple[str, str]:
    """The error of a backward that makes a NaN, and the traces of the forward that anomaly mode warns with."""
    x = torch.zeros(3, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.autograd.detect_anomaly():
            loss = fn(x).sum()  # the call that is to be named
            with pytest.raises(RuntimeError, match="returned nan values in its 0th output") as error:
                loss.backward()
    return str(error.value), "".join(str(item.message) for item in caught)


class TestAnomalyMode:
    @staticmethod
    def root_of_square(x: Tensor) -> Tensor:
        return x.square().sqrt()  # the line that makes the NaN

    def test_names_the_call_of_the_fused_function(self) -> None:
        error, trace = anomaly(fully_fused(self.root_of_square))
        assert "CompiledFunctionBackward" in error
        for text in ("Traceback of forward call", Path(__file__).name, "the call that is to be named"):
            assert text in trace

    def test_names_the_line_inside_the_function(self) -> None:
        assert "the line that makes the NaN" in anomaly(self.root_of_square)[1]
        assert "the line that makes the NaN" in anomaly(fully_fused(self.root_of_square))[1]


class TestModes:
    @both_backends
    def test_autocast(self, backend: str, compilations: list[None]) -> None:
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).sin()

        fused = fully_fused(layer, backend)
        x, weight = leaf(8, 16), leaf(16, 4)
        seen = []
        for enabled in (False, True, False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                expected, got = layer(x, weight), fused(x, weight)
            assert got.dtype == expected.dtype == (torch.bfloat16 if enabled else torch.float32)
            # One bf16 rounding is 2**-8 of a value, and Inductor rounds less often than eager does.
            tolerance = {"rtol": 2e-2, "atol": 5e-2} if enabled else {"rtol": 1.3e-6, "atol": 1e-5}
            torch.testing.assert_close(got, expected, **tolerance)
            torch.testing.assert_close(gradients(got, x, weight), gradients(expected, x, weight), **tolerance)
            seen.append(len(compilations))
        # The first call in autocast compiles; later ones find their graph.
        assert seen[0] < seen[1] == seen[2] == seen[3]

    def test_autocast_inside(self) -> None:
        def layer(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = x @ x
            return inside, x @ x

        x = leaf(4, 4)
        expected, got = layer(x), fully_fused(layer)(x)
        assert [value.dtype for value in got] == [torch.bfloat16, torch.float32]
        torch.testing.assert_close(got, expected)
        # Eager casts x once and adds both its gradients in bf16; traced, each is cast back and they add in float32.
        torch.testing.assert_close(gradients(got, x), gradients(expected, x), rtol=2e-2, atol=5e-2)

    def test_no_grad_and_inference_mode(self) -> None:
        x, fused = leaf(4), fully_fused(torch.sin)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode, torch.no_grad):
            with mode():
                got = fused(x)
            assert got.requires_grad == (mode is torch.enable_grad)
            assert got.is_inference() == (mode is torch.inference_mode)
            torch.testing.assert_close(got.clone(), x.sin(), check_stride=False)

    def test_no_grad_inside(self) -> None:
        def layer(x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().mean()
            return x.sin() * scale

        x = leaf(4)
        (got,) = torch.autograd.grad(fully_fused(layer)(x).sum(), x)
        torch.testing.assert_close(got, x.detach().cos() * x.detach().abs().mean())


class TestSavedTensorHooks:
    @staticmethod
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin().square()

    @both_backends
    def test_pack_and_unpack(self, backend: str) -> None:
        fused = fully_fused(self.layer, backend)
        inputs = leaf(4, 5), leaf(5, 6)
        fused(*inputs)
        calls: list[str] = []

        def pack(value: Tensor) -> tuple[str, Tensor]:
            calls.append("pack")
            return "packed", value.detach().clone()

        def unpack(packed: tuple[str, Tensor]) -> Tensor:
            calls.append("unpack")
            assert packed[0] == "packed"
            return packed[1]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out = fused(*inputs)
        packed = calls.count("pack")
        assert packed > 0
        assert "unpack" not in calls
        torch.testing.assert_close(gradients(out, *inputs), gradients(self.layer(*inputs), *inputs))
        assert calls.count("unpack") == calls.count("pack") == packed

    def test_what_is_unpacked_is_what_backward_uses(self) -> None:
        fused = fully_fused(torch.square)
        x = leaf(4)
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value * 10, lambda value: value):
            out = fused(x)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 20 * x.detach())


def run_backward_as_it_is(graph_module: Any) -> Any:
    """A compiled-autograd graph, run op by op."""
    return torch.compile(graph_module, backend="eager", fullgraph=True)


@both_backends
def test_compiled_autograd_around_the_backward(backend: str) -> None:
    graphs: list[Any] = []

    def compiler(graph_module: Any) -> Any:
        graphs.append(graph_module)
        return run_backward_as_it_is(graph_module)

    def use(fn: Any) -> Any:
        x, weight = leaf(4, 5), leaf(5, 6)
        for _ in range(2):
            x.grad = weight.grad = None
            loss = (fn(x, weight) * x.sum()).square().sum()
            with compiled_autograd._enable(compiler):
                loss.backward()
        return x.grad, weight.grad

    same_as_eager(lambda x, weight: (x @ weight).sin(), use, backend)
    assert len(graphs) == 2  # one of eager's, one of the fused function's


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_one_cuda_graph_per_size(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor import cudagraph_trees

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin().square()

    recorded: list[Any] = []
    make = cudagraph_trees.CUDAGraphNode.__init__

    def noted(node: Any, *args: Any, **kwargs: Any) -> None:
        recorded.append(node)
        make(node, *args, **kwargs)

    monkeypatch.setattr(cudagraph_trees.CUDAGraphNode, "__init__", noted)
    weight = torch.randn(8, 4, device="cuda", requires_grad=True)
    counts: dict[int, list[int]] = {}
    with torch._inductor.config.patch("triton.cudagraphs", True):
        fused = fully_fused(layer, "inductor", dynamic=True)
        for size in (5, 9, 17):
            # The first call warms up, the second records, the others replay.
            for _ in range(5):
                torch.compiler.cudagraph_mark_step_begin()
                x = torch.randn(size, 8, device="cuda")
                out, expected = fused(x, weight), layer(x, weight)
                torch.testing.assert_close(out, expected)
                torch.testing.assert_close(gradients(out, weight), gradients(expected, weight))
                counts.setdefault(size, []).append(len(recorded))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert 0 < counts[5][-1] < counts[9][-1] < counts[17][-1]
    for of_size in counts.values():
        assert of_size[-1] == of_size[-2]


class TestBackwardTwice:
    @staticmethod
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin().square()

    @pytest.mark.parametrize(
        ("backend", "dynamic"),
        [("eager", None), ("eager", True), pytest.param("inductor", None, marks=pytest.mark.slow)],
    )
    @functorch_config.patch(donated_buffer=False)  # Inductor's backward may reuse the memory that it reads
    def test_retain_graph(self, backend: str, dynamic: bool | None) -> None:
        def use(fn: Any) -> Any:
            leaves = leaf(4, 5), leaf(5, 6)
            loss = fn(*leaves).sum()
            loss.backward(retain_graph=True)
            once = [value.grad.clone() for value in leaves]
            loss.backward()
            torch.testing.assert_close([value.grad for value in leaves], [2 * value for value in once])
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
            return once

        same_as_eager(self.layer, use, backend, dynamic=dynamic)

    def test_memory_that_was_given_away_is_not_read_again(self) -> None:
        loss = fully_fused(self.layer, "inductor")(leaf(4, 5), leaf(5, 6)).sum()
        with pytest.raises(RuntimeError, match=r"torch\._functorch\.config\.donated_buffer=False"):
            loss.backward(retain_graph=True)

    @both_backends
    @functorch_config.patch(donated_buffer=False)
    def test_a_gradient_of_the_gradient_is_refused_by_name(self, backend: str) -> None:
        leaves = leaf(4, 5), leaf(5, 6)
        loss = fully_fused(self.layer, backend)(*leaves).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        torch.testing.assert_close(first, torch.autograd.grad(self.layer(*leaves).sum(), leaves))
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            first[0].sum().backward()


class TestModules:
    @both_backends
    def test_running_statistics(self, backend: str) -> None:
        def use(model: Any) -> Any:
            outs = []
            for step in range(2):
                out = model(torch.randn(5, 6))
                outs.append((out, gradients(out, *model.parameters())))
                assert dict(model.named_buffers())["1.num_batches_tracked"] == step + 1
            assert not torch.equal(dict(model.named_buffers())["1.running_mean"], torch.zeros(8))
            buffers = [buffer.clone() for buffer in model.buffers()]
            model.eval()
            outs.append((model(torch.randn(5, 6)), ()))
            torch.testing.assert_close(list(model.buffers()), buffers)
            return outs, buffers

        same_as_eager(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU()), use, backend)

    @both_backends
    def test_tied_weights(self, backend: str) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(10, 6)
                self.head = nn.Linear(6, 10, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.embed(tokens).sin())

        def use(model: Any) -> Any:
            assert model.head.weight is model.embed.weight
            assert len(list(model.parameters())) == 1
            tokens = torch.tensor([[1, 2, 2], [9, 0, 1]])
            for _ in range(2):
                (gradient,) = torch.autograd.grad(
                    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()), [model.head.weight]
                )
                with torch.no_grad():
                    model.head.weight.sub_(gradient)
            return gradient, model.embed.weight

        same_as_eager(Tied(), use, backend)

    def test_weights_untied_later(self) -> None:
        layer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        layer[1].weight = layer[0].weight
        plain, fused = copy.deepcopy(layer), fully_fused(layer)
        results = []
        for model, inner in ((plain, plain), (fused, layer)):
            torch.manual_seed(1)
            x = torch.randn(3, 4)
            tied = model(x)
            inner[1].weight = nn.Parameter(torch.randn(4, 4))
            results.append((tied, model(x)))
        torch.testing.assert_close(results[1], results[0])


class TestGradientHooks:
    def test_on_an_input(self) -> None:
        def use(fn: Any) -> Any:
            start = leaf(4)
            x = start * 1
            calls: list[Tensor] = []
            x.register_hook(lambda dx: calls.append(dx) or dx * 3)
            fn(x).sum().backward()
            torch.testing.assert_close(calls, [start.detach().cos()])
            torch.testing.assert_close(start.grad, 3 * start.detach().cos())
            return start.grad

        same_as_eager(torch.sin, use)

    def test_on_an_output(self) -> None:
        x = leaf(4)
        out = fully_fused(torch.sin)(x)
        out.register_hook(lambda dy: dy * 5)
        out.sum().backward()
        torch.testing.assert_close(x.grad, 5 * x.detach().cos())

    @pytest.mark.parametrize("under_compiled_autograd", [False, True])
    def test_on_an_intermediate(self, under_compiled_autograd: bool) -> None:
        calls: list[Tensor] = []

        def layer(x: Tensor) -> Tensor:
            hidden = x.sin()
            # Without compiled autograd, Dynamo cannot trace a hook that changes a list.
            hidden.register_hook(
                (lambda dhidden: calls.append(dhidden) or dhidden * 7)
                if under_compiled_autograd
                else (lambda dhidden: dhidden * 7)
            )
            return hidden.square()

        x = leaf(4)
        with torch._dynamo.config.patch(compiled_autograd=under_compiled_autograd):
            fused = fully_fused(layer)
            loss = fused(x).sum()
            if under_compiled_autograd:
                with compiled_autograd._enable(run_backward_as_it_is):
                    loss.backward()
                torch.testing.assert_close(calls, [2 * x.detach().sin()])
            else:
                loss.backward()
        assert fused.served_by == ("eager",)
        torch.testing.assert_close(x.grad, 7 * 2 * x.detach().sin() * x.detach().cos())

    @pytest.mark.parametrize("on", ["the module", "its fused view", "a child"])
    def test_of_a_module(self, on: str) -> None:
        layer, value = TwoLinears(), leaf(3, 4)
        seen = []
        for compiled in (False, True):
            model, x = copy.deepcopy(layer), value.detach().clone().requires_grad_()
            fused = fuse(model, backend="eager", fallback=()) if compiled else model
            calls: list[tuple[Tensor, Tensor]] = []

            def hook(module: nn.Module, dinputs: Any, doutputs: Any, calls: list[Any] = calls) -> Any:
                calls.append((dinputs[0].clone(), doutputs[0].clone()))
                return (dinputs[0] * 2,)

            {"the module": model, "its fused view": fused, "a child": model.down}[on].register_full_backward_hook(hook)
            out = fused(x)
            seen.append((out, gradients(out, x, *model.parameters()), calls))
            assert len(calls) == 1
        torch.testing.assert_close(seen[1], seen[0])

    def test_of_a_module_in_one_graph_is_refused_by_name(self) -> None:
        layer = TwoLinears()
        next(layer.children()).register_full_backward_hook(lambda module, dinputs, doutputs: None)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Module-level backwards hooks require compiled autog"):
            fully_fused(layer)(leaf(3, 4))

    def test_of_a_module_under_compiled_autograd(self) -> None:
        layer, expected = TwoLinears(), leaf(3, 4)
        layer.register_full_backward_hook(lambda module, dinputs, doutputs: (dinputs[0] * 2,))
        got = expected.detach().clone().requires_grad_()
        layer(expected).square().sum().backward()
        with torch._dynamo.config.patch(compiled_autograd=True):
            fused = fully_fused(layer)
            loss = fused(got).square().sum()
            with compiled_autograd._enable(run_backward_as_it_is):
                loss.backward()
        assert {graph.served_by for graph in fused.report().graphs} == {"eager"}
        torch.testing.assert_close(got.grad, expected.grad)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class TestFunctionTransforms:
    def test_functional_call(self) -> None:
        def use(model: Any) -> Any:
            outs = [model(x := torch.randn(2, 4))]
            for _ in range(2):
                weights = {"weight": leaf(3, 4), "bias": leaf(3)}
                out = torch.func.functional_call(model, weights, (x,))
                outs += [out, *gradients(out, *weights.values())]
            return outs

        same_as_eager(nn.Linear(4, 3), use)

    # Dynamo does not trace a call that a transform makes from outside: the function runs as it was written.
    @pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
    def test_around_a_fused_function(self, transform: str) -> None:
        def total(x: Tensor) -> Tensor:
            return x.sin().sum()

        x = torch.randn(3, 4)

        def transformed(fn: Any) -> Any:
            if transform == "vmap":
                return torch.vmap(fn)(x)
            return torch.func.grad(fn)(x) if transform == "grad" else torch.func.jvp(fn, (x,), (x,))

        torch.testing.assert_close(transformed(fuse(total, backend="eager")), transformed(total))
        whole = fuse(total, backend="eager", fullgraph=True)
        if transform == "jvp":  # which does not come to Dynamo
            torch.testing.assert_close(transformed(whole), transformed(total))
            return
        with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compiled_fn\) function from eager mode is not supp"):
            transformed(whole)

    @both_backends
    def test_inside_a_fused_function(self, backend: str) -> None:
        def layer(x: Tensor) -> Tensor:
            return torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

        fused = fully_fused(layer, backend)
        x = leaf(3, 4)
        torch.testing.assert_close(fused(x), x.cos())
        torch.testing.assert_close(torch.autograd.grad(fused(x).sum(), x)[0], -x.detach().sin())
