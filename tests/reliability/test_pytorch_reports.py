"""Programs of PyTorch's reports of silent wrong results under `torch.compile`, run by `fuse` with default arguments.

docs/reliability.md lists them. "right": the results are those of eager PyTorch. "kept": so they are, since this library
keeps AOTAutograd or Inductor from the fault. "refused": an error. "inherited": the results are wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from fuselayers.partition import fuse

Verdict = Literal["right", "kept", "refused", "inherited"]
# Reports without a program here, with the verdict of docs/reliability.md.
ELSEWHERE: Final = {198333: "not run", 198280: "not run", 197889: "kept", 194329: "not run", 192635: "kept"}


@dataclass(frozen=True)
class Report:
    """A report's program.

    Attributes:
        number: of the issue.
        verdict: see above.
        function: a call of it is what the report is about.
        inputs: make its arguments.
        around: takes the compiled function, and returns what is called.
        mended: the first version of torch without the fault.
    """

    number: int
    verdict: Verdict
    function: Callable[..., Any]
    inputs: tuple[Callable[[], Tensor], ...]
    around: Callable[[Any], Callable[..., Any]] = lambda call: call
    mended: str | None = None

    @property
    def is_fault_of_torch(self) -> bool:
        """Whether `torch.compile` is wrong on a CPU with the torch that is installed."""
        is_mended = self.mended is not None and TorchVersion(torch.__version__) >= self.mended
        return self.verdict in ("kept", "inherited") and not is_mended

    def results(self, wrap: Callable[[Any], Any]) -> dict[str, Any]:
        """Outputs, the inputs after the call, what shares memory, and all gradients."""
        torch.manual_seed(0)
        leaves = [make() for make in self.inputs]
        # A written input may not be a leaf.
        inputs = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
        outputs = self.around(wrap(self.function))(*inputs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        memory = [value.untyped_storage().data_ptr() for value in (*inputs, *outputs)]
        found: dict[str, Any] = {
            "outputs": [value.detach().clone() for value in outputs],
            "inputs": [value.detach().clone() for value in inputs],
            "shared memory": [memory.index(address) for address in memory],
            "needs gradients": [value.requires_grad for value in outputs],
        }
        roots = [value for value in outputs if value.requires_grad]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if roots and wanted:
            incoming = [torch.randn(root.shape).to(root.dtype) for root in roots]
            found["gradients"] = torch.autograd.grad(roots, wanted, incoming, allow_unused=True)
        return found


REPORTS: Final[list[Report]] = []


def tensor(
    *shape: int, grad: bool = True, dtype: torch.dtype = torch.float32, layout: torch.memory_format | None = None
) -> Callable[[], Tensor]:
    def make() -> Tensor:
        value = torch.randn(shape).to(dtype)
        return (value if layout is None else value.to(memory_format=layout)).requires_grad_(grad)

    return make


def of_report(
    number: int, verdict: Verdict, *inputs: Callable[[], Tensor], **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        REPORTS.append(Report(number, verdict, function, inputs, **options))
        return function

    return add


@of_report(198270, "kept", tensor(4, 8, grad=False))
def a_write_and_a_sum_with_other_rows(x: Tensor) -> Tensor:
    x.index_put_((torch.arange(4),), x * 2)
    x.add_(x.flip(0))
    return x


@of_report(198119, "kept", tensor(2, 8, 3, 3))
def an_average_pool_with_smaller_windows(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2, ceil_mode=True)


@of_report(198095, "kept", tensor(4, 6, grad=False), around=lambda call: lambda x: call(x, x[1:]))
def a_view_of_an_input_that_overlaps_a_written_one(x: Tensor, rows: Tensor) -> Tensor:
    x.add_(100)
    return rows[0]


@of_report(198094, "kept", tensor(4, 6, grad=False), tensor(2, 6, grad=False))
def a_result_whose_operand_is_written_later(x: Tensor, rows: Tensor) -> Tensor:
    y = torch.slice_scatter(x, rows, start=1, end=3)
    x.zero_()
    return y


@of_report(198094, "kept", tensor(6, 6, grad=False))
def a_copy_between_two_writes(x: Tensor) -> Tensor:
    x.index_fill_(0, torch.tensor((1, 2)), 3.0)
    y = x.clone()
    x.clamp_(-0.5, 0.5)
    return y


@of_report(198033, "kept", tensor(8, 8, grad=False))
def a_foreach_write_of_other_rows(x: Tensor) -> Tensor:
    torch._foreach_add_([x], [x.flip(0)])
    return x


@of_report(197888, "kept", tensor(1, 4, 4, 6, 10, layout=torch.channels_last_3d))
def a_maximum_pool_in_three_dimensions(x: Tensor) -> Tensor:
    return F.adaptive_max_pool3d(x, (2, 3, 5))


@of_report(197829, "kept", tensor(8, 8, grad=False))
def rows_moved_by_one(x: Tensor) -> Tensor:
    x[1:] = x[:-1].clone()
    return x


@of_report(195451, "kept", tensor(4, 6, grad=False), tensor(2, 6, grad=False))
def a_result_that_an_input_gets_too(x: Tensor, rows: Tensor) -> Tensor:
    y = torch.slice_scatter(x, rows, start=1, end=3)
    x.copy_(y)
    return y


class ZeroGradient(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(dy)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(dx)


@of_report(193279, "inherited", tensor(4, grad=False))
def a_functional_gradient_of_an_own_backward(x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: ZeroGradient.apply(x).sum())(x)


@of_report(193061, "right", tensor(2, 64, 64), tensor(4, 64))
def norms_with_parts_of_one_parameter(x: Tensor, table: Tensor) -> Tensor:
    a, b, c, d = table.chunk(4)
    x = x + F.layer_norm(x, (64,)) * (1 + a) + b
    return x + F.layer_norm(x, (64,)) * (1 + c) + d


@of_report(192985, "inherited", tensor(4, grad=False), tensor(4, grad=False))
def a_directional_derivative_of_an_own_one(x: Tensor, dx: Tensor) -> Any:
    return torch.func.jvp(ZeroGradient.apply, (x,), (dx,))[1]


@of_report(190796, "right", tensor(2, 8, 6, 6), tensor(16, 8, 3, 3), tensor(16), tensor(2, 16))
def the_bias_of_a_convolution(x: Tensor, weight: Tensor, bias: Tensor, channels: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, padding=1) + F.silu(channels)[:, :, None, None]


@of_report(190758, "right", tensor(64, 64))
@of_report(190717, "right", tensor(64, 64))
def the_masks_of_forward_and_backward(x: Tensor) -> Tensor:
    y = checkpoint(lambda x: F.dropout(x.exp(), 0.5) * x, x, use_reentrant=False)
    # Independent of the mask, and zero only if backward has the same one.
    (dx,) = torch.autograd.grad(y.sum(), x)
    return ((dx != 0) == (y != 0)).float()


@of_report(186799, "kept", tensor(64, 33, dtype=torch.bfloat16), tensor(33, dtype=torch.bfloat16))
def the_gradient_of_a_maximum(x: Tensor, scale: Tensor) -> Tensor:
    return (x.exp() * scale + x).amax(1)


@of_report(185596, "right", tensor(8, 1, 5, 16, dtype=torch.bfloat16), tensor(16))
def sums_of_an_expanded_operand(y: Tensor, x: Tensor) -> Tensor:
    return torch.cumulative_trapezoid(y, x.expand(8, 1, 5, 16))


@of_report(
    185517,
    "inherited",
    lambda: torch.tensor([1.703125], dtype=torch.bfloat16, requires_grad=True),
    lambda: torch.zeros(1, dtype=torch.bfloat16, requires_grad=True),
    mended="2.14",
)
def a_margin_that_bfloat16_rounds(x: Tensor, y: Tensor) -> Tensor:
    return F.margin_ranking_loss(x, y, torch.ones_like(x), margin=1.7)


@of_report(185509, "right", tensor(2, 3, 6, 7), tensor(4, 3, 3, 3), tensor(4), lambda: torch.rand(2, 4, 6, 7) > 0.5)
def pools_of_convolutions_of_larger_images(x: Tensor, weight: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    larger = F.interpolate(x, scale_factor=(1.5, 1.25), mode="bilinear")[:, :, 1:7, 1:8]
    y = F.conv2d(larger, weight, bias, padding=1)
    return torch.where(mask, y, F.max_pool2d(y, 3, stride=1, padding=1))


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.mark_dirty(x)
        return x.copy_((x.unflatten(-1, (-1, 1, 2)) * turns).sum(-1).flatten(-2))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        (turns,) = ctx.saved_tensors
        return (dy.unflatten(-1, (-1, 1, 2)) * turns.mT).sum(-1).flatten(-2), None


@of_report(184113, "right", tensor(3, 8), tensor(8, 8), tensor(4, 2, 2, grad=False))
def an_own_function_that_writes_to_a_product(x: Tensor, weight: Tensor, turns: Tensor) -> Tensor:
    return Turned.apply(x @ weight, turns).square()


@of_report(183986, "kept", tensor(3, 8, grad=False), mended="2.14")
def sums_into_expanded_zeros(x: Tensor) -> Tensor:
    return torch.index_add(torch.zeros(1, 8).expand(4, 8), 0, torch.tensor((0, 1, 0)), x)


@of_report(183575, "right", tensor(6, 6, grad=False), tensor(6, 6, grad=False), tensor(6, 6, grad=False))
def the_step_of_an_optimizer(momentum: Tensor, gradient: Tensor, parameter: Tensor) -> Tensor:
    momentum.lerp_(gradient, 0.05)
    parameter.add_(momentum, alpha=-0.01)
    return gradient.to(torch.bfloat16)


@of_report(183898, "right", tensor(6), tensor(3))
@of_report(180771, "right", tensor(6), tensor(3))
def the_gradient_of_replaced_elements(x: Tensor, y: Tensor) -> Tensor:
    return torch.slice_scatter(x, y, start=1, end=4).sum()


@of_report(182765, "right", tensor(8, 8), tensor(8))
@of_report(182012, "right", tensor(8, 8), tensor(8))
def the_gradient_of_a_replaced_diagonal(x: Tensor, y: Tensor) -> Tensor:
    return torch.diagonal_scatter(x, y).sum()


@of_report(181696, "right", tensor(6, 10, 12))
def a_batch_norm_and_a_group_norm(x: Tensor) -> Tensor:
    return F.group_norm(F.elu(F.batch_norm(x, torch.zeros(10), torch.ones(10))), 5)


@of_report(181581, "refused", tensor(4, 4), tensor(4, 4))
def the_gradient_of_a_gradient(x: Tensor, weight: Tensor) -> Tensor:
    (dweight,) = torch.autograd.grad(torch.relu(x @ weight).square().sum(), weight, create_graph=True)
    return dweight.square().sum()


class SecondGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:  # type: ignore[override]
        return None, 3 * dy


@of_report(181146, "right", tensor(5))
def an_own_function_of_one_tensor_twice(x: Tensor) -> Any:
    y = x.sin()
    return SecondGradient.apply(y, y)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y += 1
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:  # type: ignore[override]
        return dy * 2


@of_report(180642, "right", tensor(6))
def an_own_function_that_writes(x: Tensor) -> Tensor:
    return Doubled.apply(x).sin()  # type: ignore[no-any-return]


def _in_bfloat16(call: Any) -> Callable[..., Any]:
    return torch.autocast("cpu", torch.bfloat16)(call)  # type: ignore[no-any-return]


@of_report(179804, "kept", tensor(4, 16), tensor(8, 16), around=_in_bfloat16)
def a_product_without_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.linear(x, weight)


@of_report(176854, "right", tensor(4))
def a_tensor_detached_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y.detach_()
    return y * x


@of_report(174016, "right", tensor(4, 8, 5))
def products_with_zeros(x: Tensor) -> Tensor:
    return (x * (torch.arange(8) != 4)[:, None]).cumprod(1)


def _difference(got: dict[str, Any], expected: dict[str, Any]) -> str:
    has_16_bits = any(value.dtype is torch.bfloat16 for value in expected["inputs"])
    tolerance = {"rtol": 0.05, "atol": 0.05} if has_16_bits else {}
    try:
        torch.testing.assert_close(got, expected, equal_nan=True, **tolerance)
    except AssertionError as error:
        return str(error)
    return ""


def _names(report: Report) -> str:
    return f"{report.number} {report.function.__name__}"


def _keep(report: Report) -> Any:
    # Each takes seconds of Inductor. `make test` runs those that would fail without a line of this library.
    return pytest.param(report, id=_names(report), marks=[] if report.verdict == "kept" else [pytest.mark.slow])


@pytest.mark.parametrize("report", [_keep(report) for report in REPORTS])
def test_a_report(report: Report) -> None:
    expected = report.results(lambda call: call)
    if report.verdict == "refused":
        with pytest.raises(RuntimeError):
            report.results(fuse)
        return
    difference = _difference(report.results(fuse), expected)
    is_wrong = report.verdict == "inherited" and report.is_fault_of_torch
    assert bool(difference) == is_wrong, difference or "torch has mended it: say so in docs/reliability.md"


@pytest.mark.slow
@pytest.mark.parametrize("report", [report for report in REPORTS if report.verdict == "kept"], ids=_names)
def test_torch_still_has_the_fault(report: Report) -> None:
    """Once it is mended in all versions, the lines against it can go."""
    assert (
        bool(_difference(report.results(torch.compile), report.results(lambda call: call))) == report.is_fault_of_torch
    )


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_part_of_a_tensor_that_is_written_after_its_copy(dynamic: bool) -> None:
    """No report has it. AOTAutograd traces a contiguous clone of the part, whose copy is the clone itself."""

    def copied(x: Tensor) -> Tensor:
        y = x.contiguous()
        x.zero_()
        return y

    weight = torch.randn(4, 17, requires_grad=True)
    y = fuse(copied, backend="eager", dynamic=dynamic)((weight * 1)[1:, 1:])
    torch.testing.assert_close(y, weight[1:, 1:], rtol=0, atol=0)
    (dweight,) = torch.autograd.grad(y.sum(), weight)
    torch.testing.assert_close(dweight, F.pad(torch.ones(3, 16), (1, 0, 1, 0)), rtol=0, atol=0)
    assert torch.compile(copied, backend="aot_eager")((weight * 1)[1:, 1:]).eq(0).all(), "torch has mended it"


def test_plain_torch_still_has_a_wrong_gradient_of_instance_norm() -> None:
    """And the fused function has not."""

    def normed(x: Tensor) -> Tensor:
        return F.instance_norm(x).flatten(2).permute(2, 0, 1).sin()

    x, dy = torch.randn(2, 16, 2, 3, requires_grad=True), torch.randn(6, 2, 16)
    (right,) = torch.autograd.grad(normed(x).clone(), x, dy.permute(1, 2, 0).contiguous().permute(2, 0, 1))
    (fused,) = torch.autograd.grad(fuse(normed, backend="eager")(x), x, dy)
    (plain,) = torch.autograd.grad(normed(x), x, dy)
    torch.testing.assert_close(fused, right)
    assert _difference({"inputs": [], "gradients": plain}, {"inputs": [], "gradients": fused})


def test_the_page_lists_each_report() -> None:
    page = Path(__file__).parents[2] / "docs" / "reliability.md"
    rows = re.findall(r"^\| \[(\d+)\].*\| ([a-z ]+) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {int(number): verdict for number, verdict in rows} == ELSEWHERE | {
        report.number: report.verdict for report in REPORTS
    }
