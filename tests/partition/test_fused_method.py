import copy
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from fuselayers.partition import FusedFunction, fuse


class Layer(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    @fuse(backend="eager", dynamic=False)
    def scale(self, x: Tensor, *, power: int) -> Tensor:
        """x to a power, scaled."""
        return x**power * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x, power=3) + Layer.scale(self, x, power=2)


class Inherits(Layer):
    pass


class FusedForward(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    @fuse(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() * self.factor


class Breaks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        method = self.scale
        y = x * 2
        torch._dynamo.graph_break()
        assert method.report() is not None
        return method(y, power=2)  # type: ignore[no-any-return]


class TestInsideACompiledFunction:
    @pytest.mark.parametrize("kind", [Layer, Inherits, FusedForward])
    @pytest.mark.parametrize("outer", [torch.compile, fuse])
    def test_one_graph_and_the_same_numbers(self, kind: Any, outer: Callable[..., Any]) -> None:
        for factor in (2.0, 3.0):
            layer, x = kind(factor), torch.rand(4)
            whole = outer(layer, backend="eager", fullgraph=True)
            slope = x.sin() if kind is FusedForward else x**3 + x**2
            for result in (whole(x), layer(x)):
                torch.testing.assert_close(result, slope * factor)
                torch.testing.assert_close(torch.autograd.grad(result.sum(), layer.factor)[0], slope.sum())

    def test_two_instances_share_a_graph(self) -> None:
        graphs, x = CompileCounter(), torch.rand(4)
        whole = torch.compile(lambda layer, x: layer.scale(x, power=2), backend=graphs, fullgraph=True)
        for factor in (2.0, 3.0):
            torch.testing.assert_close(whole(Layer(factor), x), x**2 * factor)
        assert graphs.frame_count == 1

    def test_over_a_graph_break(self) -> None:
        layer, x = Breaks(2.0), torch.rand(4)
        torch.testing.assert_close(torch.compile(layer, backend="eager")(x), (x * 2) ** 2 * 2)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda method: pickle.loads(pickle.dumps(method))])
def test_a_method_is_of_the_function_and_the_instance_and_a_copy_of_a_copied_instance(clone: Any) -> None:
    layer = Layer(2.0)
    method = layer.scale
    assert isinstance(Layer.scale, FusedFunction)
    assert (method.__func__, method.__self__, method.options) == (Layer.scale, layer, Layer.scale.options)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = method.nothing
    assert (method.__name__, method.__doc__) == ("scale", "x to a power, scaled.")
    assert str(inspect.signature(method)) == "(x: torch.Tensor, *, power: int) -> torch.Tensor"
    assert repr(method) == "<fused method Layer.scale of Layer()>"
    twin, x = clone(method), torch.rand(4)
    assert twin.__self__ is not layer
    torch.testing.assert_close(twin(x, power=2), x**2 * 2)
