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

from fuselayers.partition import FusedFunction, FusedModule, fuse

# What is tested here is AOTAutograd's work in front of every backend, so `make test` asks one of them, and Inductor
# about mutation, where it has passes of its own.
both_backends = pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])


def fails(error: type[Exception] | tuple[type[Exception], ...], reason: str) -> pytest.MarkDecorator:
    """Says what is known not to be as in eager; strict, so that a fix takes the mark away."""
    return pytest.mark.xfail(strict=True, raises=error, reason=reason)


class Made:
    """Every fused function of one test, so that the test can end with: all of it was compiled, none of it ran plain."""

    def __init__(self) -> None:
        self.functions: list[tuple[str, FusedFunction]] = []

    def __call__(self, fn: Any, backend: str = "eager", **options: Any) -> Any:
        fused = fuse(fn, backend=backend, fallback=(), **{"fullgraph": True, **options})
        self.functions.append((backend, fused.fused if isinstance(fused, FusedModule) else fused))
        return fused


@pytest.fixture(autouse=True)
def _nothing_compiled_yet() -> None:
    # Dynamo of 2.11 remembers by file, line and name which sizes changed: another test's `layer` would change ours.
    torch.compiler.reset()


@pytest.fixture
def fully_fused() -> Iterator[Made]:
    made = Made()
    yield made
    for backend, function in made.functions:
        assert function.served_by == (backend,)


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def twin(value: Tensor) -> Tensor:
    """The same values in other memory, as a leaf."""
    return value.detach().clone().requires_grad_(value.requires_grad)


def same_layout(got: Tensor, expected: Tensor) -> bool:
    return (got.shape, got.stride(), got.storage_offset(), got.dtype, got.requires_grad) == (
        expected.shape,
        expected.stride(),
        expected.storage_offset(),
        expected.dtype,
        expected.requires_grad,
    )


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
    def test_data(self, fully_fused: Made, backend: str, partition: str, op: str) -> None:
        def change(x: Tensor, y: Tensor) -> Tensor:
            getattr(x, op)(y)
            return x.sin()

        fused = fully_fused(change, backend, partition=partition)
        root, y = leaf(3, 4), leaf(4)
        seen = []
        for fn in (change, fused):
            leaf_x, leaf_y = twin(root), twin(y)
            x = leaf_x * 1
            address, version = x.data_ptr(), x._version
            out = fn(x, leaf_y)
            assert x.data_ptr() == address
            assert x._version > version
            torch.testing.assert_close(x, getattr(root * 1, op)(y))
            # The gradient goes through the mutated input and through the result.
            (out.sum() + x.square().sum()).backward()
            seen.append((x, out, leaf_x.grad, leaf_y.grad))
        torch.testing.assert_close(seen[1], seen[0])

    @both_backends
    def test_data_without_gradients(self, fully_fused: Made, backend: str) -> None:
        def running_mean(mean: Tensor, x: Tensor) -> Tensor:
            mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
            return x - mean

        fused = fully_fused(running_mean, backend)
        means = torch.ones(4), torch.ones(4)
        for _ in range(3):
            x = torch.randn(5, 4)
            torch.testing.assert_close(fused(means[1], x), running_mean(means[0], x))
            torch.testing.assert_close(means[1], means[0])
        assert not torch.equal(means[1], torch.ones(4))
        # A parameter may be written to where no gradient is recorded.
        weight = leaf(4)
        weights = weight, twin(weight)
        with torch.no_grad():
            torch.testing.assert_close(fused(weights[1], x), running_mean(weights[0], x))
        torch.testing.assert_close(weights[1], weights[0])
        assert weights[1].is_leaf
        assert weights[1].requires_grad

    # Dynamo does not take these into a graph, so a part before and a part after is what is compiled.
    @pytest.mark.parametrize("change", [lambda x: x.t_(), lambda x: x.transpose_(0, 1), lambda x: x.unsqueeze_(1)])
    def test_metadata(self, fully_fused: Made, change: Callable[[Tensor], Tensor]) -> None:
        def reshape(x: Tensor) -> Tensor:
            change(x)
            return x * 2

        fused = fully_fused(reshape, fullgraph=False)
        root = leaf(3, 4)
        inputs = [twin(root) * 1 for _ in range(2)]
        outs = [fn(x) for fn, x in zip((reshape, fused), inputs, strict=True)]
        assert inputs[1].shape != root.shape
        assert same_layout(inputs[1], inputs[0])
        assert same_layout(outs[1], outs[0])
        torch.testing.assert_close(outs[1], outs[0])
        torch.testing.assert_close(inputs[1], inputs[0])

    def test_data_and_metadata(self, fully_fused: Made) -> None:
        def both(x: Tensor) -> Tensor:
            x.mul_(3)
            x.t_()
            return x.cos()

        fused = fully_fused(both, fullgraph=False)
        root, weight = leaf(3, 4), torch.randn(4, 3)
        seen = []
        for fn in (both, fused):
            start = twin(root)
            x = start * 1
            out = fn(x)
            assert x.shape == (4, 3)
            (x.square() * weight + out).sum().backward()
            seen.append((x, out, start.grad))
        torch.testing.assert_close(seen[1], seen[0])

    def test_metadata_in_one_graph_is_refused_by_name(self) -> None:
        fused = fuse(lambda x: x.t_() * 2, backend="eager", fullgraph=True)
        x = torch.ones(3, 4)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="an inplace view on a graph input is not supported"):
            fused(x)
        assert x.shape == (3, 4)

    def test_a_leaf_under_no_grad(self, fully_fused: Made) -> None:
        def clip_and_use(x: Tensor) -> Tensor:
            with torch.no_grad():
                x.clamp_(-0.5, 0.5)
            return x.square()

        fused = fully_fused(clip_and_use)
        root = leaf(16)
        seen = []
        for fn in (clip_and_use, fused):
            x = twin(root)
            out = fn(x)
            assert x.is_leaf
            assert x.abs().max() <= 0.5
            out.sum().backward()
            seen.append((x, out, x.grad))
        assert not torch.equal(seen[1][0], root)
        torch.testing.assert_close(seen[1], seen[0])

    def test_a_leaf_that_requires_grad_is_refused_as_in_eager(self) -> None:
        def scale(x: Tensor) -> Tensor:
            return x.mul_(2) * 1

        fused = fuse(scale, backend="eager", fallback=())
        for fn in (scale, fused):
            x = leaf(3)
            before = x.detach().clone()
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                fn(x)
            assert torch.equal(x, before)


class TestAliases:
    @both_backends
    def test_a_view_of_an_input(self, fully_fused: Made, backend: str) -> None:
        def column(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:, 1], x + 1

        fused = fully_fused(column, backend)
        root = leaf(3, 4)
        seen = []
        for fn in (column, fused):
            start = twin(root)
            x = start * 1
            view, other = fn(x)
            assert view._is_view()
            assert view._base is x
            assert view.data_ptr() == x.data_ptr() + x.element_size()
            assert other.data_ptr() != x.data_ptr()
            view.mul_(5)
            torch.testing.assert_close(x[:, 1], root[:, 1] * 5)
            (x.square().sum() + other.sum()).backward()
            seen.append((x, view, other, start.grad))
        assert same_layout(seen[1][1], seen[0][1])
        torch.testing.assert_close(seen[1], seen[0])

    @both_backends
    def test_the_input_itself(self, fully_fused: Made, backend: str) -> None:
        def pass_on(x: Tensor) -> tuple[Tensor, Tensor]:
            return x, x.sin()

        def change_and_pass_on(x: Tensor) -> Tensor:
            return x.mul_(2)

        x = leaf(3)
        assert fully_fused(pass_on, backend)(x)[0] is x
        value = torch.ones(3)
        assert fully_fused(change_and_pass_on, backend)(value) is value
        assert value.tolist() == [2.0, 2.0, 2.0]

    @both_backends
    def test_outputs_of_each_other(self, fully_fused: Made, backend: str) -> None:
        def views(x: Tensor) -> tuple[Tensor, ...]:
            hidden = x.sin()
            return hidden, hidden.view(-1), hidden[1], hidden.t(), hidden + 1

        fused = fully_fused(views, backend)
        root = leaf(3, 4)
        seen = []
        for fn in (views, fused):
            x = twin(root)
            hidden, flat, row, turned, apart = fn(x)
            assert hidden.data_ptr() == flat.data_ptr() == turned.data_ptr()
            assert row.data_ptr() == hidden.data_ptr() + 4 * hidden.element_size()
            assert apart.data_ptr() != hidden.data_ptr()
            row.mul_(3)
            torch.testing.assert_close(flat[4:8], root[1].sin() * 3)
            hidden.add_(1)
            (flat.square().sum() + apart.sum()).backward()
            seen.append((hidden, flat, row, turned, apart, x.grad))
        assert all(same_layout(got, expected) for got, expected in zip(seen[1], seen[0], strict=True))
        torch.testing.assert_close(seen[1], seen[0])

    def test_the_same_output_twice(self, fully_fused: Made) -> None:
        def twice(x: Tensor) -> tuple[Tensor, Tensor]:
            out = x.sin()
            return out, out

        first, second = fully_fused(twice)(leaf(3))
        assert first is second

    @both_backends
    def test_an_output_and_its_detached_twin(self, fully_fused: Made, backend: str) -> None:
        def with_detached(x: Tensor) -> tuple[Tensor, Tensor]:
            out = x.sin()
            return out, out.detach()

        fused = fully_fused(with_detached, backend)
        root = leaf(4)
        seen = []
        for fn in (with_detached, fused):
            x = twin(root)
            out, detached = fn(x)
            assert out is not detached
            assert out.requires_grad
            assert not detached.requires_grad
            assert detached.grad_fn is None
            torch.testing.assert_close(detached, out.detach())
            (out * detached).sum().backward()
            seen.append((out, detached, x.grad, out.data_ptr() == detached.data_ptr()))
        torch.testing.assert_close(seen[1][:3], seen[0][:3])
        torch.testing.assert_close(seen[1][2], root.detach().cos() * root.detach().sin())
        assert seen[1][3] == seen[0][3]

    def test_a_view_with_its_own_backward(self, fully_fused: Made) -> None:
        class FlatWithTripledGradient(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.view(-1)

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Tensor:
                return dy.view(3, 4) * 3

        def flat(x: Tensor) -> Tensor:
            return FlatWithTripledGradient.apply(x)

        fused = fully_fused(flat)
        root, weight = leaf(3, 4), torch.randn(12)
        for fn in (flat, fused):
            start = twin(root)
            x = start * 1
            out = fn(x)
            assert out.data_ptr() == x.data_ptr()
            (out * weight).sum().backward()
            torch.testing.assert_close(start.grad, weight.view(3, 4) * 3)

    @both_backends
    def test_overlapping_inputs(self, fully_fused: Made, backend: str) -> None:
        def change_one(a: Tensor, b: Tensor) -> Tensor:
            a.mul_(2)
            return a * b

        fused = fully_fused(change_one, backend)
        root = leaf(10)
        seen = []
        for fn in (change_one, fused):
            start = twin(root)
            storage = start * 1
            out = fn(storage[:6], storage[4:])
            (out.sum() + storage.square().sum()).backward()
            seen.append((storage, out, start.grad))
        torch.testing.assert_close(seen[1], seen[0])
        torch.testing.assert_close(seen[1][0][4:6], root[4:6] * 2)

    @pytest.mark.parametrize(
        "dynamic",
        [
            True,
            pytest.param(
                None,
                marks=fails(
                    AssertionError, "AOTAutograd guards on which inputs overlap only where their sizes are symbolic"
                ),
            ),
        ],
    )
    def test_inputs_that_overlap_only_in_the_second_call(self, fully_fused: Made, dynamic: bool | None) -> None:
        def change_one(a: Tensor, b: Tensor) -> Tensor:
            a.mul_(2)
            return a * b

        fused = fully_fused(change_one, dynamic=dynamic)
        for second in (slice(6, 12), slice(3, 9), slice(6, 12)):
            storages = [torch.arange(12.0) for _ in range(2)]
            outs = [fn(x[:6], x[second]) for fn, x in zip((change_one, fused), storages, strict=True)]
            torch.testing.assert_close(outs[1], outs[0])
            torch.testing.assert_close(storages[1], storages[0])

    @both_backends
    def test_the_same_input_twice(self, fully_fused: Made, backend: str) -> None:
        def product(a: Tensor, b: Tensor) -> Tensor:
            return a.sin() * b

        def change_one(a: Tensor, b: Tensor) -> Tensor:
            a.mul_(2)
            return a * b

        for fn in (product, change_one):
            fused = fully_fused(fn, backend)
            roots = leaf(5), leaf(5)
            for same in (True, False, True):
                seen = []
                for call in (fn, fused):
                    leaves = [twin(root) for root in roots]
                    a, b = (value * 1 for value in leaves)
                    out = call(a, a if same else b)
                    (out.sum() + a.sum() + b.sum()).backward()
                    seen.append((out, a, b, *(value.grad for value in leaves)))
                torch.testing.assert_close(seen[1], seen[0])


@both_backends
def test_gradients_with_other_strides_than_the_output(fully_fused: Made, backend: str) -> None:
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).view(-1, 4, 6).sin()

    fused = fully_fused(layer, backend)
    x, weight = leaf(8, 5), leaf(5, 6)
    tangents = {
        "contiguous": torch.randn(2, 4, 6),
        "transposed": torch.randn(6, 4, 2).permute(2, 1, 0),
        "expanded": torch.tensor(1.5).expand(2, 4, 6),
        "broadcast row": torch.randn(1, 1, 6).expand(2, 4, 6),
        "sliced": torch.randn(2, 4, 12)[..., ::2],
    }
    for name, tangent in tangents.items():
        assert tangent.is_contiguous() == (name == "contiguous")
        before = tangent.clone()
        expected = torch.autograd.grad(layer(x, weight), (x, weight), tangent)
        torch.testing.assert_close(torch.autograd.grad(fused(x, weight), (x, weight), tangent), expected)
        assert torch.equal(tangent, before)


class TestTensorSubclasses:
    @both_backends
    def test_two_tensors_in_one(self, fully_fused: Made, backend: str) -> None:
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).sin() + x

        fused = fully_fused(layer, backend)
        values = [torch.randn(4, 4) for _ in range(4)]
        seen = []
        for fn in (layer, fused):
            inner = [value.clone() for value in values]
            x, weight = (TwoTensor(*pair).requires_grad_() for pair in (inner[:2], inner[2:]))
            out = fn(x, weight)
            assert type(out) is TwoTensor
            out.square().sum().backward()
            assert type(x.grad) is type(weight.grad) is TwoTensor
            seen.append([part for value in (out, x.grad, weight.grad) for part in (value.a, value.b)])
        torch.testing.assert_close(seen[1], seen[0])
        # Both halves are really computed: each is what its own plain tensors give.
        torch.testing.assert_close(seen[1][1], layer(values[1], values[3]))

    def test_dtensor(self, fully_fused: Made, one_process_mesh: Any) -> None:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).sin()

        fused = fully_fused(layer)
        values, tangent = (torch.randn(4, 6), torch.randn(6, 8)), torch.randn(4, 8)
        seen = []
        for fn in (layer, fused):
            x = DTensor.from_local(values[0].clone(), one_process_mesh, [Replicate()]).requires_grad_()
            weight = DTensor.from_local(values[1].clone(), one_process_mesh, [Shard(1)]).requires_grad_()
            out = fn(x, weight)
            assert isinstance(out, DTensor)
            assert out.placements == (Shard(1),)
            # In eager, a tangent with other placements could give the gradients other ones too.
            out.backward(DTensor.from_local(tangent, one_process_mesh, [Shard(1)]))
            assert isinstance(weight.grad, DTensor)
            parts = out, x.grad, weight.grad
            seen.append(([value.placements for value in parts], [value.to_local() for value in parts]))
        assert seen[1][0] == seen[0][0]
        torch.testing.assert_close(seen[1][1], seen[0][1])
        torch.testing.assert_close(seen[1][1][0], layer(*values))

    def test_semi_structured_sparse_weight(self, fully_fused: Made) -> None:
        from torch.sparse import to_sparse_semi_structured

        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return F.linear(x, weight).relu()

        mask = torch.tensor([0, 0, 1, 1]).tile((128, 32))
        weight = torch.randn(128, 128, dtype=torch.float16) * mask
        if not torch.cuda.is_available():
            reason = "original_tensor.device= cpu is not supported! Only CUDA tensors are currently supported"
            with pytest.raises(RuntimeError, match=reason):
                to_sparse_semi_structured(weight)
            pytest.skip(f"to_sparse_semi_structured: {reason}")
        sparse = to_sparse_semi_structured(weight.cuda())
        x = torch.randn(128, 128, dtype=torch.float16, device="cuda")
        expected = layer(x, sparse)
        torch.testing.assert_close(fully_fused(layer)(x, sparse), expected)
        torch.testing.assert_close(expected, layer(x, weight.cuda()), rtol=1e-2, atol=1e-2)

    @both_backends
    def test_float8_weight(self, fully_fused: Made, backend: str) -> None:
        def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
            return F.linear(x, weight.to(torch.float32) * scale).sin()

        fused = fully_fused(layer, backend)
        x, weight, scale = leaf(4, 8), torch.randn(6, 8).to(torch.float8_e4m3fn), leaf(6, 1)
        seen = []
        for fn in (layer, fused):
            leaves = twin(x), twin(scale)
            out = fn(leaves[0], weight, leaves[1])
            seen.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
        assert seen[1][0].dtype == torch.float32
        torch.testing.assert_close(seen[1], seen[0])


class CompilationCounter:
    """Counts what Dynamo and AOTAutograd compile, a backward that was put off included."""

    def __init__(self) -> None:
        self.count = 0

    def started(self, *_: Any) -> None:
        self.count += 1


@pytest.fixture
def compilations(_nothing_compiled_yet: None) -> Iterator[CompilationCounter]:
    from torch._dynamo.callback import callback_handler

    counter = CompilationCounter()
    callback_handler.register_start_callback(counter.started)
    yield counter
    callback_handler.remove_start_callback(counter.started)


class TestDynamicSizes:
    @staticmethod
    def layer(x: Tensor) -> Tensor:
        return x.sin().expand(3, *x.shape).sum((1, 2)) / x.shape[0]

    @both_backends
    def test_backward_is_compiled_with_forward(
        self, fully_fused: Made, compilations: CompilationCounter, backend: str
    ) -> None:
        fused = fully_fused(self.layer, backend, dynamic=True)
        for size in (5, 9, 17):
            x = leaf(size, 4)
            (expected,) = torch.autograd.grad(self.layer(x).square().sum(), x)
            loss = fused(x).square().sum()
            assert compilations.count == 1
            (got,) = torch.autograd.grad(loss, x)
            assert compilations.count == 1
            torch.testing.assert_close(got, expected)

    def test_the_counter_sees_a_backward_that_is_put_off(
        self, fully_fused: Made, compilations: CompilationCounter
    ) -> None:
        # Without sizes to save, AOTAutograd may wait for the first backward; the test above would notice.
        loss = fully_fused(self.layer, dynamic=False)(leaf(5, 4)).square().sum()
        assert compilations.count == 1
        loss.backward()
        assert compilations.count == 2

    def test_a_size_that_changes_becomes_symbolic(self, fully_fused: Made, compilations: CompilationCounter) -> None:
        fused = fully_fused(self.layer)
        counts = []
        for size in (5, 9, 17, 33):
            x = leaf(size, 4)
            (expected,) = torch.autograd.grad(self.layer(x).square().sum(), x)
            torch.testing.assert_close(torch.autograd.grad(fused(x).square().sum(), x)[0], expected)
            counts.append(compilations.count)
        assert counts[1] == counts[2] == counts[3] > counts[0]


class WithFoldableWeight(nn.Module):
    """Its weight goes through an op before it is used, which freezing does once and for all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.sin() * 2).relu()


class TestFreezing:
    def test_weights_become_constants(self, fully_fused: Made) -> None:
        layer = WithFoldableWeight().eval()
        fused = fully_fused(layer, "inductor")
        x = torch.randn(3, 8)
        with torch._inductor.config.patch(freezing=True), torch.no_grad():
            expected = layer(x)
            torch.testing.assert_close(fused(x), expected)
            # As torch documents: "After freezing, weights can no longer be updated."
            layer.weight.zero_()
            assert not torch.allclose(layer(x), expected)
            torch.testing.assert_close(fused(x), expected)
            # Other values of x still go through.
            layer.load_state_dict({"weight": torch.ones(6, 8)})
            torch.testing.assert_close(fused(2 * x), 2 * expected)

    @pytest.mark.slow
    def test_a_whole_layer(self, fully_fused: Made) -> None:
        layer = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).eval()
        fused = fully_fused(layer, "inductor")
        x = torch.randn(3, 8)
        with torch._inductor.config.patch(freezing=True), torch.no_grad():
            torch.testing.assert_close(fused(x), layer(x))

    @pytest.mark.slow
    def test_without_it_new_weights_are_seen(self, fully_fused: Made) -> None:
        layer = WithFoldableWeight().eval()
        x = torch.randn(3, 8)
        fused = fully_fused(layer, "inductor")
        with torch.no_grad():
            torch.testing.assert_close(fused(x), layer(x))
            layer.weight.mul_(2)
            torch.testing.assert_close(fused(x), layer(x))


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

    def test_names_the_call_of_the_fused_function(self, fully_fused: Made) -> None:
        error, trace = anomaly(fully_fused(self.root_of_square))
        assert "CompiledFunctionBackward" in error
        assert "Traceback of forward call that caused the error" in trace
        assert Path(__file__).name in trace
        assert "the call that is to be named" in trace

    def test_names_the_line_inside_the_function(self, fully_fused: Made) -> None:
        assert "the line that makes the NaN" in anomaly(self.root_of_square)[1]
        assert "the line that makes the NaN" in anomaly(fully_fused(self.root_of_square))[1]


class TestModes:
    @both_backends
    def test_autocast(self, fully_fused: Made, backend: str, compilations: CompilationCounter) -> None:
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
            tolerance = {"rtol": 2e-2, "atol": 2e-2} if enabled else {"rtol": 1.3e-6, "atol": 1e-5}
            torch.testing.assert_close(got, expected, **tolerance)
            gradients = [torch.autograd.grad(out.float().square().sum(), (x, weight)) for out in (got, expected)]
            assert [value.dtype for value in gradients[0]] == [torch.float32] * 2
            torch.testing.assert_close(gradients[0], gradients[1], rtol=2e-2, atol=5e-2 if enabled else 1e-5)
            seen.append(compilations.count)
        # Entering traces anew; coming back finds each graph again.
        assert seen[0] < seen[1] == seen[2] == seen[3]

    def test_autocast_inside(self, fully_fused: Made) -> None:
        def layer(x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                inside = x @ x
            return inside, x @ x

        fused = fully_fused(layer)
        x = leaf(4, 4)
        expected, got = layer(x), fused(x)
        assert [value.dtype for value in got] == [torch.bfloat16, torch.float32]
        torch.testing.assert_close(got, expected)
        gradients = [torch.autograd.grad(sum(part.float().sum() for part in out), x) for out in (got, expected)]
        # Eager casts x once and adds both its gradients in bf16; traced, each is cast back and they add in float32.
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-2, atol=2e-2)

    def test_no_grad_and_inference_mode(self, fully_fused: Made) -> None:
        def layer(x: Tensor) -> Tensor:
            return x.sin() * 2

        fused = fully_fused(layer)
        x = leaf(4)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad, torch.inference_mode, torch.no_grad):
            with mode():
                expected, got = layer(x), fused(x)
            assert got.requires_grad == expected.requires_grad == (mode is torch.enable_grad)
            assert got.is_inference() == expected.is_inference() == (mode is torch.inference_mode)
            torch.testing.assert_close(got, expected)

    def test_no_grad_inside(self, fully_fused: Made) -> None:
        def layer(x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().mean()
            return x.sin() * scale

        fused = fully_fused(layer)
        x = leaf(4)
        (expected,) = torch.autograd.grad(layer(x).sum(), x)
        (got,) = torch.autograd.grad(fused(x).sum(), x)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(got, x.detach().cos() * x.detach().abs().mean())


class TestSavedTensorHooks:
    @staticmethod
    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin().square()

    @both_backends
    def test_pack_and_unpack(self, fully_fused: Made, backend: str) -> None:
        fused = fully_fused(self.layer, backend)
        inputs = leaf(4, 5), leaf(5, 6)
        expected = torch.autograd.grad(self.layer(*inputs).sum(), inputs)
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
        torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), expected)
        assert calls.count("unpack") == calls.count("pack") == packed

    def test_what_is_unpacked_is_what_backward_uses(self, fully_fused: Made) -> None:
        fused = fully_fused(torch.square)
        x = leaf(4)
        with torch.autograd.graph.saved_tensors_hooks(lambda value: value * 10, lambda value: value):
            out = fused(x)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], 20 * x.detach())

    def test_save_on_cpu(self, fully_fused: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        fused = fully_fused(self.layer)
        inputs = leaf(4, 5), leaf(5, 6)
        expected = torch.autograd.grad(self.layer(*inputs).sum(), inputs)
        fused(*inputs)
        moved: list[Tensor] = []
        move = Tensor.cpu
        monkeypatch.setattr(Tensor, "cpu", lambda value: moved.append(value) or move(value))
        with torch.autograd.graph.save_on_cpu():
            out = fused(*inputs)
        assert {tuple(value.shape) for value in moved} >= {(4, 5), (5, 6)}
        torch.testing.assert_close(torch.autograd.grad(out.sum(), inputs), expected)


def run_backward_as_it_is(graph_module: Any) -> Any:
    """What compiled autograd makes of a backward, run op by op."""
    return torch.compile(graph_module, backend="eager", fullgraph=True)


class TestCompiledAutograd:
    @both_backends
    def test_around_the_backward(self, fully_fused: Made, backend: str) -> None:
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).sin()

        graphs: list[Any] = []

        def compiler(graph_module: Any) -> Any:
            graphs.append(graph_module)
            return run_backward_as_it_is(graph_module)

        fused = fully_fused(layer, backend)
        x, weight = leaf(4, 5), leaf(5, 6)
        expected = torch.autograd.grad((layer(x, weight) * x.sum()).square().sum(), (x, weight))
        for _ in range(2):
            loss = (fused(x, weight) * x.sum()).square().sum()
            with compiled_autograd._enable(compiler):
                loss.backward()
            torch.testing.assert_close((x.grad, weight.grad), expected)
            x.grad = weight.grad = None
        assert len(graphs) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
class TestCudaGraphs:
    def test_one_per_size(self, fully_fused: Made, monkeypatch: pytest.MonkeyPatch) -> None:
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return (x @ weight).sin().square()

        from torch._dynamo.utils import counters
        from torch._inductor import cudagraph_trees

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
                    expected = layer(x, weight)
                    (expected_gradient,) = torch.autograd.grad(expected.sum(), weight)
                    out = fused(x, weight)
                    torch.testing.assert_close(out, expected)
                    (gradient,) = torch.autograd.grad(out.sum(), weight)
                    torch.testing.assert_close(gradient, expected_gradient)
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
        [
            ("eager", None),
            ("eager", True),
            pytest.param("inductor", None, marks=pytest.mark.slow),
        ],
    )
    @functorch_config.patch(donated_buffer=False)  # Inductor's backward reuses what it read, unless it is told not to
    def test_retain_graph(self, fully_fused: Made, backend: str, dynamic: bool | None) -> None:
        fused = fully_fused(self.layer, backend, dynamic=dynamic)
        roots = leaf(4, 5), leaf(5, 6)
        seen = []
        for fn in (self.layer, fused):
            leaves = [twin(root) for root in roots]
            loss = fn(*leaves).sum()
            loss.backward(retain_graph=True)
            once = [value.grad.clone() for value in leaves]
            loss.backward(retain_graph=True)
            torch.testing.assert_close([value.grad for value in leaves], [2 * value for value in once])
            loss.backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
            seen.append([value.grad for value in leaves])
        torch.testing.assert_close(seen[1], seen[0])

    def test_memory_that_was_given_away_is_not_read_again(self, fully_fused: Made) -> None:
        loss = fully_fused(self.layer, "inductor")(leaf(4, 5), leaf(5, 6)).sum()
        with pytest.raises(RuntimeError, match=r"torch\._functorch\.config\.donated_buffer=False"):
            loss.backward(retain_graph=True)

    def test_eager_backward_gives_nothing_away(self, fully_fused: Made) -> None:
        loss = fully_fused(self.layer, dynamic=True)(leaf(4, 5), leaf(5, 6)).sum()
        loss.backward(retain_graph=True)
        loss.backward()

    def test_retain_graph_after_a_call_without(self, fully_fused: Made) -> None:
        fused = fully_fused(self.layer)
        leaves = leaf(4, 5), leaf(5, 6)
        expected = torch.autograd.grad(self.layer(*leaves).sum(), leaves)
        torch.testing.assert_close(torch.autograd.grad(fused(*leaves).sum(), leaves), expected)
        loss = fused(*leaves).sum()
        for retain_graph in (True, False):
            torch.testing.assert_close(torch.autograd.grad(loss, leaves, retain_graph=retain_graph), expected)

    @both_backends
    @functorch_config.patch(donated_buffer=False)
    def test_a_gradient_of_the_gradient_is_refused_by_name(self, fully_fused: Made, backend: str) -> None:
        leaves = leaf(4, 5), leaf(5, 6)
        expected = torch.autograd.grad(self.layer(*leaves).sum(), leaves)
        loss = fully_fused(self.layer, backend)(*leaves).sum()
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        torch.testing.assert_close(gradients, expected)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            gradients[0].sum().backward()


class TestModules:
    @both_backends
    def test_running_statistics(self, fully_fused: Made, backend: str) -> None:
        layer = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        other = copy.deepcopy(layer)
        fused = fully_fused(other, backend)
        for step in range(3):
            x = torch.randn(5, 6)
            seen = []
            for model in (layer, fused):
                model.zero_grad()
                out = model(x)
                out.square().sum().backward()
                seen.append((out, *(value.grad for value in model.parameters()), *model.buffers()))
            torch.testing.assert_close(seen[1], seen[0])
            assert other[1].num_batches_tracked == step + 1
        assert not torch.equal(other[1].running_mean, torch.zeros(8))
        layer.eval()
        fused.eval()
        torch.testing.assert_close(fused(x), layer(x))
        assert other[1].num_batches_tracked == 3

    @both_backends
    def test_tied_weights(self, fully_fused: Made, backend: str) -> None:
        class Tied(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(10, 6)
                self.head = nn.Linear(6, 10, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens: Tensor) -> Tensor:
                return self.head(self.embed(tokens).sin())

        plain = Tied()
        other = copy.deepcopy(plain)
        fused = fully_fused(other, backend)
        assert fused.head.weight is fused.embed.weight
        assert len(list(fused.parameters())) == 1
        tokens = torch.tensor([[1, 2, 2], [9, 0, 1]])
        for _ in range(3):
            for model in (plain, fused):
                model.zero_grad()
                F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
                with torch.no_grad():
                    model.head.weight.sub_(model.head.weight.grad)
            torch.testing.assert_close(other.embed.weight.grad, plain.embed.weight.grad)
            torch.testing.assert_close(other.embed.weight, plain.embed.weight)

    def test_weights_untied_later(self, fully_fused: Made) -> None:
        layer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        layer[1].weight = layer[0].weight
        fused = fully_fused(layer)
        x = torch.randn(3, 4)
        torch.testing.assert_close(fused(x), layer(x))
        layer[1].weight = nn.Parameter(torch.randn(4, 4))
        torch.testing.assert_close(fused(x), layer(x))


class TestGradientHooks:
    def test_on_an_input(self, fully_fused: Made) -> None:
        fused = fully_fused(torch.sin)
        root = leaf(4)
        for fn in (torch.sin, fused):
            start = twin(root)
            x = start * 1
            calls: list[Tensor] = []
            x.register_hook(lambda dx, calls=calls: calls.append(dx) or dx * 3)
            fn(x).sum().backward()
            assert len(calls) == 1
            torch.testing.assert_close(calls[0], root.detach().cos())
            torch.testing.assert_close(start.grad, 3 * root.detach().cos())

    def test_on_an_output(self, fully_fused: Made) -> None:
        fused = fully_fused(torch.sin)
        x = leaf(4)
        out = fused(x)
        out.register_hook(lambda dy: dy * 5)
        out.sum().backward()
        torch.testing.assert_close(x.grad, 5 * x.detach().cos())

    def test_on_an_intermediate(self, fully_fused: Made) -> None:
        def layer(x: Tensor) -> Tensor:
            hidden = x.sin()
            hidden.register_hook(lambda dhidden: dhidden * 7)
            return hidden.square()

        fused = fully_fused(layer)
        root = leaf(4)
        seen = []
        for fn in (layer, fused):
            x = twin(root)
            fn(x).sum().backward()
            seen.append(x.grad)
        torch.testing.assert_close(seen[1], seen[0])
        torch.testing.assert_close(seen[1], 7 * 2 * root.detach().sin() * root.detach().cos())

    def test_on_an_intermediate_under_compiled_autograd(self) -> None:
        calls: list[Tensor] = []

        def layer(x: Tensor) -> Tensor:
            hidden = x.sin()
            hidden.register_hook(lambda dhidden: calls.append(dhidden) or dhidden * 7)
            return hidden.square()

        x = leaf(4)
        with torch._dynamo.config.patch(compiled_autograd=True):
            fused = fuse(layer, backend="eager", fallback=(), fullgraph=True)
            loss = fused(x).sum()
            with compiled_autograd._enable(run_backward_as_it_is):
                loss.backward()
        assert fused.served_by == ("eager",)
        torch.testing.assert_close(calls, [2 * x.detach().sin()])
        torch.testing.assert_close(x.grad, 7 * 2 * x.detach().sin() * x.detach().cos())

    @pytest.mark.parametrize("on", ["the module", "its fused view", "a child"])
    def test_of_a_module(self, on: str) -> None:
        layer = TwoLinears()
        x = leaf(3, 4)
        seen = []
        for compiled in (False, True):
            model = copy.deepcopy(layer)
            fused = fuse(model, backend="eager", fallback=()) if compiled else model
            calls: list[tuple[Tensor, Tensor]] = []

            def hook(module: nn.Module, dinputs: Any, doutputs: Any, calls: list[Any] = calls) -> Any:
                calls.append((dinputs[0].clone(), doutputs[0].clone()))
                return (dinputs[0] * 2,)

            {"the module": model, "its fused view": fused, "a child": model.down}[on].register_full_backward_hook(hook)
            value = twin(x)
            out = fused(value)
            out.square().sum().backward()
            assert len(calls) == 1
            seen.append((out, calls, [value.grad, *(weight.grad for weight in model.parameters())]))
        torch.testing.assert_close(seen[1], seen[0])
        if on == "its fused view":
            assert fused.fused.served_by == ("eager",)

    def test_of_a_module_in_one_graph_is_refused_by_name(self) -> None:
        layer = TwoLinears()
        layer.register_full_backward_hook(lambda module, dinputs, doutputs: None)
        fused = fuse(layer, backend="eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Module-level backwards hooks require compiled autog"):
            fused(leaf(3, 4))

    def test_of_a_module_under_compiled_autograd(self) -> None:
        layer = TwoLinears()
        layer.register_full_backward_hook(lambda module, dinputs, doutputs: (dinputs[0] * 2,))
        expected = leaf(3, 4)
        got = twin(expected)
        layer(expected).square().sum().backward()
        with torch._dynamo.config.patch(compiled_autograd=True):
            fused = fuse(layer, backend="eager", fallback=(), fullgraph=True)
            loss = fused(got).square().sum()
            with compiled_autograd._enable(run_backward_as_it_is):
                loss.backward()
        assert fused.fused.served_by == ("eager",)
        torch.testing.assert_close(got.grad, expected.grad)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class TestFunctionTransforms:
    def test_functional_call(self, fully_fused: Made) -> None:
        layer = nn.Linear(4, 3)
        fused = fully_fused(layer)
        x = torch.randn(2, 4)
        for _ in range(2):
            weights = {"weight": leaf(3, 4), "bias": leaf(3)}
            leaves = tuple(weights.values())
            expected = torch.func.functional_call(layer, weights, (x,))
            got = torch.func.functional_call(fused, weights, (x,))
            torch.testing.assert_close(got, expected)
            torch.testing.assert_close(
                torch.autograd.grad(got.square().sum(), leaves), torch.autograd.grad(expected.square().sum(), leaves)
            )
        torch.testing.assert_close(fused(x), layer(x))

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
    def test_inside_a_fused_function(self, fully_fused: Made, backend: str) -> None:
        def layer(x: Tensor) -> Tensor:
            return torch.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)

        fused = fully_fused(layer, backend)
        x = leaf(3, 4)
        torch.testing.assert_close(fused(x), x.cos())
        torch.testing.assert_close(torch.autograd.grad(fused(x).sum(), x)[0], -x.detach().sin())
