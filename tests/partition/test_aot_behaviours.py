"""`fuse` keeps AOTAutograd's promises: values, gradients, aliases and mutations are those of eager.

Each test names a behaviour that a compiler which only compares values would lose.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.partition import fuse

# AOTAutograd is the same for every backend, so `make test` runs eager, and Inductor only where it has extra passes.
pytestmark = pytest.mark.filterwarnings("error::fuselayers.partition.FallbackWarning")


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


def fully_fused(fn: Any, backend: str = "eager", **options: Any) -> Any:
    return fuse(fn, backend=backend, **{"fullgraph": True, **options})


def same_as_eager(fn: Any, use: Callable[[Any], Any], backend: str = "eager", **options: Any) -> Any:
    """Call `use` with the plain and the fused function, compare the results, and return the fused function's.

    Both calls start from the same seed, so `use` may draw its inputs.
    """
    fused = fully_fused(fn, backend, **options)
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
def test_a_mutated_input(backend: str, partition: str, op: str) -> None:
    def change(x: Tensor, y: Tensor) -> Tensor:
        getattr(x, op)(y)
        return x.sin()

    def use(fn: Any) -> Any:
        start, y = leaf(3, 4), leaf(4)
        x = start * 1
        address, version = x.data_ptr(), x._version
        out = fn(x, y)
        assert (x.data_ptr(), x._version > version) == (address, True)
        # The gradient flows through the mutated input and through the result.
        return x, out, gradients((out, x), start, y)

    same_as_eager(change, use, backend, partition=partition)


class TestAliases:
    def test_the_input_itself(self) -> None:
        x, value = leaf(3), torch.ones(3)
        assert fully_fused(lambda x: (x, x.sin()))(x)[0] is x
        assert fully_fused(lambda x: x.mul_(2))(value) is value
        assert value.tolist() == [2.0, 2.0, 2.0]

    def test_outputs_of_each_other(self) -> None:
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
            layouts.append([(out.stride(), out.storage_offset(), out.requires_grad) for out in outs])
            return outs, gradients((flat, apart), x)

        same_as_eager(views, use)
        assert layouts[0] == layouts[1]

    def test_overlapping_inputs(self) -> None:
        def use(fn: Any) -> Any:
            start = leaf(10)
            storage = start * 1
            out = fn(storage[:6], storage[4:])
            torch.testing.assert_close(storage[4:6], start[4:6] * 2)
            return storage, out, gradients((out, storage), start)

        same_as_eager(change_one, use)

    @pytest.mark.parametrize("mutates", [False, True])
    def test_the_same_input_twice(self, mutates: bool) -> None:
        def use(fn: Any) -> Any:
            leaves, outs = [leaf(5), leaf(5)], []
            for same in (True, False, True):
                a, b = (value * 1 for value in leaves)
                out = fn(a, a if same else b)
                outs.append((out, a, b, gradients((out, a, b), *leaves)))
            return outs

        same_as_eager(change_one if mutates else lambda a, b: a.sin() * b, use)


def change_one(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return a * b


def test_dtensor(one_process_mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def layer(x: Tensor, weight: Tensor) -> Tensor:
        return (x @ weight).sin()

    placements = []

    def use(fn: Any) -> Any:
        values = torch.randn(4, 6), torch.randn(6, 8)
        x = DTensor.from_local(values[0], one_process_mesh, [Replicate()]).requires_grad_()
        weight = DTensor.from_local(values[1], one_process_mesh, [Shard(1)]).requires_grad_()
        out = fn(x, weight)
        # In eager, the tangent's placements can change those of the gradients.
        out.backward(DTensor.from_local(torch.randn(4, 8), one_process_mesh, [Shard(1)]))
        parts = out, x.grad, weight.grad
        placements.append([part.placements for part in parts])
        torch.testing.assert_close(out.to_local(), layer(*values))
        return [part.to_local() for part in parts]

    same_as_eager(layer, use)
    assert placements[0] == placements[1]
    assert placements[1][0] == (Shard(1),)


def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).sin().square()


def test_autocast_has_its_own_graph() -> None:
    fused = fully_fused(product)
    x, weight = leaf(8, 16), leaf(16, 4)
    for enabled in (False, True, False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            expected, got = product(x, weight), fused(x, weight)
        assert got.dtype == expected.dtype == (torch.bfloat16 if enabled else torch.float32)
        # One bf16 rounding is 2**-8 of a value, and Inductor rounds less often than eager does.
        tolerance = {"rtol": 2e-2, "atol": 5e-2} if enabled else {"rtol": 1.3e-6, "atol": 1e-5}
        torch.testing.assert_close(got, expected, **tolerance)
        torch.testing.assert_close(gradients(got, x, weight), gradients(expected, x, weight), **tolerance)
    assert len(fused.report().graphs) == 2


def test_saved_tensor_hooks_pack_and_unpack_each_tensor() -> None:
    fused, inputs = fully_fused(product), (leaf(4, 5), leaf(5, 6))
    fused(*inputs)
    packed: list[Tensor] = []
    unpacked: list[Tensor] = []

    def pack(value: Tensor) -> Tensor:
        packed.append(value)
        return value.detach().clone()

    def unpack(value: Tensor) -> Tensor:
        unpacked.append(value)
        return value

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = fused(*inputs)
    assert len(packed) > 0 == len(unpacked)
    torch.testing.assert_close(gradients(out, *inputs), gradients(product(*inputs), *inputs))
    assert len(unpacked) == len(packed)


class TestBackwardTwice:
    @pytest.mark.parametrize(
        ("backend", "dynamic"),
        [("eager", None), ("eager", True), pytest.param("inductor", None, marks=pytest.mark.slow)],
    )
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

        same_as_eager(product, use, backend, dynamic=dynamic)

    def test_a_gradient_of_the_gradient_is_refused_by_name(self) -> None:
        leaves = leaf(4, 5), leaf(5, 6)
        loss = fully_fused(product)(*leaves).sum()
        first = torch.autograd.grad(loss, leaves, create_graph=True)
        torch.testing.assert_close(first, torch.autograd.grad(product(*leaves).sum(), leaves))
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            first[0].sum().backward()


@pytest.mark.parametrize("on", ["the module", "its fused view", "a child"])
def test_gradient_hooks_of_a_module(on: str) -> None:
    layer, value = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), leaf(3, 4)
    seen = []
    for compiled in (False, True):
        model, x = copy.deepcopy(layer), value.detach().clone().requires_grad_()
        fused = fuse(model, backend="eager", fallback=()) if compiled else model
        calls: list[tuple[Tensor, Tensor]] = []

        def hook(module: nn.Module, dinputs: Any, doutputs: Any, calls: list[Any] = calls) -> Any:
            calls.append((dinputs[0].clone(), doutputs[0].clone()))
            return (dinputs[0] * 2,)

        {"the module": model, "its fused view": fused, "a child": model[2]}[on].register_full_backward_hook(hook)
        out = fused(x)
        seen.append((out, gradients(out, x, *model.parameters()), calls))
        assert len(calls) == 1
    torch.testing.assert_close(seen[1], seen[0])


# Dynamo does not trace a function that a transform calls, so the plain function runs.
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transforms_around_a_fused_function(transform: Callable[..., Any]) -> None:
    def total(x: Tensor) -> Tensor:
        return x.sin().sum()

    x = torch.randn(3, 4)
    torch.testing.assert_close(transform(fuse(total, backend="eager"))(x), transform(total)(x))
    whole = fuse(total, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compiled_fn\) function from eager mode is not supp"):
        transform(whole)(x)
