import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from benchmarks.layers import TransformerLayer
from fuselayers._torch.tracing import boxed
from fuselayers.partition import PartitionError, budget, explain, fuse, min_cut, saved_bytes

ROWS, HIDDEN = 32, 48
ACTIVATION = ROWS * HIDDEN * 4  # bytes


def layer(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return x + F.dropout(F.gelu(x @ up) @ down, 0.1)


def layer_inputs() -> list[Tensor]:
    shapes = (ROWS, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def _written_over(x: Tensor) -> Tensor:
    hidden = x.sin()
    hidden.mul_(2)
    return hidden.cos()


def _in_two_graphs(x: Tensor) -> Tensor:
    x = x.sin().cos()
    torch._dynamo.graph_break()
    return x.exp().sin()


def _parts_and_the_whole(x: Tensor) -> Tensor:
    whole = x.exp()
    first, second, _ = whole.split(16, dim=1)
    return (first * second).sum() + whole.sin().sum()


FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "layer": layer,
    "written": _written_over,
    "two_graphs": _in_two_graphs,
    "parts": _parts_and_the_whole,
    "unbind": lambda x: x.unbind(0)[3].sin() + x.unbind(0)[2].exp(),
    "where": lambda x: torch.where(x > 0, x.sin(), x.cos()),
    "index": lambda x: x[torch.arange(3)].sin(),
    "topk": lambda x: torch.topk(x, 5)[0].sin(),
    "pool": lambda x: F.max_pool1d(x[None], 2).sin(),
    "dropout": lambda x: F.dropout(x.sin(), 0.3).cos(),
    "views": lambda x: x.view(-1).sin().view(HIDDEN, ROWS).t().exp(),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.view(1, 4, 8, HIDDEN),) * 3),
}


# Inductor compiles for seconds, so it compiles one function.
@pytest.mark.parametrize(
    ("name", "backend", "partition"),
    [
        *((name, "eager", "min_cut") for name in FUNCTIONS),
        ("layer", "inductor", "min_cut"),
        ("layer", "eager", "default"),
        pytest.param("layer", "inductor", "default", marks=pytest.mark.slow),
    ],
)
def test_the_report_has_every_byte_that_is_saved(name: str, backend: str, partition: str) -> None:
    function, inputs = FUNCTIONS[name], layer_inputs()[: 3 if name == "layer" else 1]
    report = explain(function, *inputs, backend=backend, partition=partition)
    kept = saved_bytes(fuse(function, backend=backend, partition=partition), *inputs)
    assert report.totals["this"].saved_bytes == sum(value.num_bytes for value in report.saved) == kept
    assert report.totals["eager"].saved_bytes == saved_bytes(function, *inputs)


def test_the_rivals_totals_are_what_torch_compile_saves() -> None:
    inputs = layer_inputs()
    report = explain(layer, *inputs)
    # Runs Inductor's two graphs op by op, since compiling them takes seconds.
    backend = partial(compile_fx, inner_compile=lambda graph_module, *_, **__: boxed(graph_module))
    assert report.totals["torch min_cut"].saved_bytes == saved_bytes(torch.compile(layer, backend=backend), *inputs)
    assert report.totals["default"].saved_bytes >= report.totals["this"].saved_bytes


def test_each_value_is_named_with_its_line_and_its_reason() -> None:
    report = explain(layer, *layer_inputs())
    by_op = {value.op: value for value in report.saved}
    matmul = by_op["aten.mm.default"]
    assert (matmul.shape, matmul.dtype, matmul.num_bytes) == ((ROWS, 4 * HIDDEN), "float32", 4 * ACTIVATION)
    assert matmul.source.startswith(__file__)
    assert matmul.source.endswith("return x + F.dropout(F.gelu(x @ up) @ down, 0.1)")
    assert "recomputing it" in matmul.reason
    seed = next(value for value in report.saved if value.num_bytes == 8)
    assert seed.reason == "it draws random numbers"
    assert by_op["input"].reason.endswith("it is an input")
    assert not [value for value in report.saved if value.dtype == "bool"]


def test_recomputed_values_have_their_cost() -> None:
    report = explain(layer, *layer_inputs(), partition=budget(0.7))
    matmul = next(value for value in report.recomputed if value.op == "aten.mm.default")
    assert matmul.flops == 2 * ROWS * HIDDEN * 4 * HIDDEN
    assert matmul.num_bytes == 4 * ACTIVATION
    assert matmul.moved_bytes > matmul.num_bytes
    assert report.totals["this"].recomputed_flops == sum(value.flops for value in report.recomputed)
    assert report.forward_flops == 2 * 2 * ROWS * HIDDEN * 4 * HIDDEN
    assert report.backward_flops == 2 * report.forward_flops + matmul.flops


def test_parameters_cost_nothing() -> None:
    report = explain(TransformerLayer(HIDDEN, 4), torch.randn(2, 16, HIDDEN, requires_grad=True))
    parameters = [value for value in report.saved if value.op == "parameter"]
    assert parameters
    assert {value.num_bytes for value in parameters} == {0}
    assert {value.reason.rpartition("; ")[2] for value in parameters} == {"it outlives the call anyway"}


def test_nothing_runs_and_nothing_is_allocated() -> None:
    # 12 * 65,536^2 parameters: 206 GB in float32, and far more in activations.
    with torch.device("meta"):
        model = TransformerLayer(1 << 16, 4)
        x = torch.empty(64, 512, 1 << 16, requires_grad=True)
    report = explain(model, x)
    assert report.totals["this"].saved_bytes > 10**10
    assert report.totals["this"].saved_bytes < report.totals["eager"].saved_bytes


def test_a_users_own_partitioner_is_explained_by_what_it_made() -> None:
    def mine(joint_module: Any, joint_inputs: Any, **options: Any) -> Any:
        return min_cut(joint_module, joint_inputs, **options)

    inputs = layer_inputs()
    report, ours = explain(layer, *inputs, partition=mine), explain(layer, *inputs)
    assert report.partition == "mine"
    assert report.totals["this"] == ours.totals["this"]
    assert {value.reason for value in report.saved} == {"your partitioner chose it"}


def test_a_function_with_a_graph_break_has_a_graph_for_each_part() -> None:
    report = explain(_in_two_graphs, torch.randn(ROWS, HIDDEN, requires_grad=True))
    assert len(report.graphs) == 2
    assert report.totals["this"].saved_bytes == 2 * ACTIVATION
    with pytest.raises(ValueError, match=r"^a curve needs one graph, this report has 2; explain each part on its own$"):
        report.pareto()


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^the results of <lambda> do not require grad for these arguments, so noth"):
        explain(lambda x: x.sin(), torch.ones(2))
    with pytest.raises(ValueError, match=r"^Dynamo does not trace sin .*, and the values that eager saves are saved; "):
        explain(torch.compiler.disable(torch.sin), torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"^explain takes a function or a module, got int$"):
        explain(3)  # type: ignore[arg-type]
    text = "explain takes a function or a module, got str; explain(fuselayers.build('gpt_nano'), tokens)"
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        explain("gpt_nano", torch.zeros(1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no partitioner 'mincut'; did you mean 'min_cut'"):
        explain(layer, *layer_inputs(), partition="mincut")
    with pytest.raises(PartitionError, match=r"^this graph needs more than 10 bytes saved for backward: the smallest "):
        explain(layer, *layer_inputs(), partition=budget(10))


# Torch's own attention runs for a few tokens, the library's for more.
@pytest.mark.parametrize("tokens", [8, 64])
@pytest.mark.parametrize("compress", [None, "int8"])
def test_attention_under_a_checkpoint(compress: Any, tokens: int) -> None:
    """torch restores its random state around the op, under a fake mode that only AOTAutograd activates."""

    def checkpointed(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda x: F.scaled_dot_product_attention(x, x, x), x, use_reentrant=False)
        return result.sin()

    x = torch.randn(2, 4, tokens, 64, requires_grad=True)
    report = explain(checkpointed, x, compress=compress)
    fused = fuse(checkpointed, backend="eager", compress=compress)
    assert report.totals["this"].saved_bytes == saved_bytes(fused, x)
    fused(x).sum().backward()
    gradient, x.grad = x.grad, None
    checkpointed(x).sum().backward()
    exact = 0.0 if tokens == 8 else 1e-5
    assert_close(gradient, x.grad, rtol=0, atol=exact if compress is None else 0.02)


def test_compiled_and_fused_functions_inside_run_eagerly() -> None:
    """Compiled code would read the memory of a fake tensor, which has none, and crash the process."""
    fused = fuse(nn.Linear(4, 4), backend="inductor", fallback=())
    fused(torch.randn(2, 4)).sum().backward()
    model, x = nn.Sequential(fused, torch.compile(nn.Linear(4, 4))), torch.randn(2, 4)
    assert explain(model, x).totals["eager"].saved_bytes == saved_bytes(nn.Sequential(*[nn.Linear(4, 4)] * 2), x)
