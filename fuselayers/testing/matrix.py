"""The whole contract of a function or a module of any library, as a table."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import in_one_line
from ..names import name_of, no_such
from . import checks as contract
from .checks import NotApplicable
from .comparison import DTYPES, Op, assert_as_good_as, cast, samples
from .layouts import check_layouts

_VALUES: Final = "values and gradients"
CHECKS: Final[dict[str, Callable[..., str | None]]] = {
    _VALUES: assert_as_good_as,
    "layouts": check_layouts,
    "single gradients": contract.check_single_gradients,
    "mixed dtypes": contract.check_mixed_dtypes,
    "autocast": contract.check_autocast,
    "NaN and infinity": contract.check_not_finite,
    "unwritten memory": contract.check_poisoned,
    "double backward": contract.check_double_backward,
    "torch.func": contract.check_transforms,
    "dynamic sizes": contract.check_dynamic,
}
"""Every check by its name in the report. `check` adds "fused, <backend>" for each backend."""


@dataclass(frozen=True)
class Cell:
    """One check in one dtype.

    Attributes:
        check: the name of the check in the report.
        dtype: the name of the dtype, such as "float32".
        outcome: the result of the check.
        reason: why it failed or does not apply, or a remark on a pass.
    """

    check: str
    dtype: str
    outcome: Literal["pass", "FAIL", "n/a"]
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The results of all checks of one function. `print` shows them as a table, with the reasons below.

    Attributes:
        subject: what was checked.
        cells: check by check, dtype by dtype.
    """

    subject: str
    cells: Sequence[Cell]

    @property
    def failures(self) -> list[Cell]:
        """The cells that failed."""
        return [cell for cell in self.cells if cell.outcome == "FAIL"]

    def raise_on_failure(self) -> None:
        """Raise if a check failed, or if nothing was compared, as when the reference always raises.

        Raises:
            AssertionError: a check failed, "values and gradients" passed in no dtype, or, without it, no check passed.
                The text is the whole report.
        """
        needed = [cell for cell in self.cells if cell.check == _VALUES] or self.cells
        if self.failures or not any(cell.outcome == "pass" for cell in needed):
            raise AssertionError(f"{self}\n(a report without a pass of {_VALUES} shows nothing)")

    def __str__(self) -> str:
        dtypes = list(dict.fromkeys(cell.dtype for cell in self.cells))
        rows: dict[str, list[str]] = {}
        for cell in self.cells:
            rows.setdefault(cell.check, []).append(f"{cell.outcome:8}")
        width = max(map(len, rows), default=0)
        left_out = sum(cell.outcome == "n/a" for cell in self.cells)
        lines = [f"{self.subject}: {len(self.failures)} of {len(self.cells)} checks failed, {left_out} n/a", ""]
        lines.append("  ".join([" " * width, *(f"{dtype:8}" for dtype in dtypes)]))
        lines += ["  ".join([f"{check:{width}}", *outcomes]) for check, outcomes in rows.items()]
        reasons = [
            f"{cell.outcome:4}  {cell.check} ({cell.dtype}): {cell.reason}" for cell in self.cells if cell.reason
        ]
        return "\n".join([*(line.rstrip() for line in lines), "", *sorted(reasons)]).rstrip()


_BACKENDS: Final = ("eager", "inductor")


def check(
    op: Op,
    reference: Op,
    inputs: Sequence[Tensor] | Sequence[Sequence[int]],
    *,
    options: Mapping[str, Any] | None = None,
    checks: Collection[str] | None = None,
    backends: Sequence[str] = _BACKENDS,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Report:
    """Run every check that the ops of this library pass.

    Args:
        op: the function; it takes the inputs, and the options by name, and returns a tensor or several.
        reference: the same function in plain torch. If it raises, the check does not apply.
        inputs: tensors, or shapes of random tensors on the CPU. Small ones suffice; give different dimensions different
            sizes. Only floating inputs get gradients and other dtypes.
        options: for both functions. An op that draws random numbers needs its seed here.
        checks: names in CHECKS, or "fused, <backend>"; all if None. Keep "values and gradients": a report fails if
            that check passed in no dtype, or, without it, if no check passed.
        backends: backends of `fuselayers.fuse` that compile the op. "inductor" takes seconds per dtype.
        dtypes: dtypes of the floating inputs, one column each.

    Raises:
        ValueError: no inputs, or an unknown check.

    >>> report = check(torch.nn.functional.silu, lambda x: x * x.sigmoid(), [(6, 9)], backends=["eager"])
    >>> report.raise_on_failure()
    >>> def forgets_a_factor(x):
    ...     return x * x.detach().sigmoid()
    >>> print(check(forgets_a_factor, lambda x: x * x.sigmoid(), [(6, 9)], checks=["values and gradients"]))
    forgets_a_factor: 4 of 4 checks failed, 0 n/a
    <BLANKLINE>
                          float32   bfloat16  float16   float64
    values and gradients  FAIL      FAIL      FAIL      FAIL
    <BLANKLINE>
    FAIL  values and gradients (bfloat16): d0: error 0.19..., allowed ...
    FAIL  values and gradients (float16): d0: error 0.19..., allowed ...
    FAIL  values and gradients (float32): d0: error 0.19..., allowed ...
    FAIL  values and gradients (float64): d0: error 0.19..., allowed ...
    """
    subject = name_of(op.func if isinstance(op, partial) else op)
    return _matrix(subject, op, reference, _tensors(inputs), None, options or {}, checks, backends, dtypes)


def check_module(
    module: nn.Module,
    reference: nn.Module | Op,
    inputs: Sequence[Tensor] | Sequence[Sequence[int]],
    *,
    checks: Collection[str] | None = None,
    backends: Sequence[str] = _BACKENDS,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> Report:
    """Run the same checks on the forward of a module of any library, parameters included.

    Parameters count as inputs: their layouts, dtypes and gradients are checked too. Their values are the module's,
    moved by up to 1/4, since weights of one and biases of zero hide errors. The module keeps its mode, train or eval,
    and its values. A module that draws random numbers cannot be compared.

    Args:
        module: the module; its forward takes the inputs.
        reference: a module whose parameters have the same names, or a function in plain torch that takes the inputs,
            and the module's parameters by name.
        inputs: as in `check`. Only their first dimension has dynamic sizes.
        checks: as in `check`.
        backends: as in `check`.
        dtypes: as in `check`.

    Raises:
        ValueError: as `check`; or the reference's parameters have other names.

    >>> def layer_norm(x, weight, bias):
    ...     centred = x - x.mean(-1, keepdim=True)
    ...     return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias
    >>> check_module(torch.nn.LayerNorm(9), layer_norm, [(6, 9)], checks=["layouts"]).failures
    []
    """
    tensors = _tensors(inputs)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    if isinstance(reference, nn.Module):
        others = [name for name, _ in reference.named_parameters()]
        if sorted(others) != sorted(parameters):
            raise ValueError(
                f"the reference's parameters must have the module's names {', '.join(parameters)}, got "
                f"{', '.join(others)}; or pass a function of the inputs, with the parameters by name"
            )
    moved = samples(*(value.shape for value in parameters.values()), device=tensors[0].device)
    values = [value + step / 16 for value, step in zip(parameters.values(), moved, strict=True)]

    def row_tensors(shape: tuple[int, int]) -> list[Tensor]:
        first = tensors[0].shape[:1]
        batch = [value[torch.arange(shape[0]) % len(value)] if value.shape[:1] == first else value for value in tensors]
        return [*batch, *values]

    op, truth = (_call_of(form, len(tensors), list(parameters)) for form in (module, reference))
    subject = type(module).__name__
    return _matrix(subject, op, truth, [*tensors, *values], row_tensors, {}, checks, backends, dtypes)


def _call_of(form: nn.Module | Op, count: int, names: Sequence[str]) -> Op:
    """Return a function that takes `count` inputs and then the parameters, by position."""

    def call(*args: Tensor) -> Any:
        parameters = dict(zip(names, args[count:], strict=True))
        if not isinstance(form, nn.Module):
            return form(*args[:count], **parameters)
        dtype = next(value.dtype for value in args if value.is_floating_point())
        # Copies, since a call may write into them.
        buffers = {
            name: value.to(dtype if value.is_floating_point() else value.dtype, copy=True)
            for name, value in form.named_buffers()
        }
        return functional_call(form, {**parameters, **buffers}, args[:count])

    return call


def _matrix(
    subject: str,
    op: Op,
    reference: Op,
    inputs: Sequence[Tensor],
    inputs_of: Callable[[tuple[int, int]], list[Tensor]] | None,
    options: Mapping[str, Any],
    wanted: Collection[str] | None,
    backends: Sequence[str],
    dtypes: Sequence[torch.dtype],
) -> Report:
    runs = CHECKS | {f"fused, {backend}": partial(contract.check_fused, backend=backend) for backend in backends}
    for name in wanted or ():
        if name not in runs:
            raise ValueError(no_such("check", name, runs))
    cells = []
    for name, run in runs.items():
        for dtype in dtypes if wanted is None or name in wanted else ():
            # Copies for each check, since it may overwrite them.
            own: Any = [value.detach().clone() for value in cast(inputs, dtype)]
            if name == "dynamic sizes" and inputs_of is not None:
                own = partial(_sized, inputs_of, dtype)
            copies = {key: value.clone() if isinstance(value, Tensor) else value for key, value in options.items()}
            cells.append(_cell(name, dtype, partial(run, op, _or_not_applicable(reference), own, **copies)))
    return Report(subject, cells)


def _cell(name: str, dtype: torch.dtype, run: Callable[[], str | None]) -> Cell:
    column = str(dtype).removeprefix("torch.")
    try:
        return Cell(name, column, "pass", run() or "")
    except NotApplicable as reason:
        return Cell(name, column, "n/a", str(reason))
    except AssertionError as error:
        return Cell(name, column, "FAIL", str(error).strip().partition("\n")[0])
    except Exception as error:
        return Cell(name, column, "FAIL", f"raises {in_one_line(error)}")


def _or_not_applicable(reference: Op) -> Op:
    def call(*args: Any, **options: Any) -> Any:
        try:
            return reference(*args, **options)
        except Exception as error:
            raise NotApplicable(f"the reference raises {in_one_line(error)}") from error

    return call


def _sized(make: Callable[[tuple[int, int]], list[Tensor]], dtype: torch.dtype, shape: tuple[int, int]) -> list[Tensor]:
    return [value.detach().clone() for value in cast(make(shape), dtype)]


def _tensors(inputs: Sequence[Tensor] | Sequence[Sequence[int]]) -> list[Tensor]:
    if not inputs:
        raise ValueError("inputs must be tensors or shapes, got none")
    device = next((item.device for item in inputs if isinstance(item, Tensor)), torch.device("cpu"))
    drawn = samples(*(item.shape if isinstance(item, Tensor) else item for item in inputs), device=device)
    return [item if isinstance(item, Tensor) else new for item, new in zip(inputs, drawn, strict=True)]
