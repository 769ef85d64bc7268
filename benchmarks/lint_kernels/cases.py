"""The cases of `benchmarks.lint_kernels`: a call of each op, as a model makes it, forward and backward.

Add an op with kernels to `CASES`. The calls run on meta tensors, which have no memory; the kernels that they would
launch are compiled with the same arguments.

The shapes are [8192, N], say 4 sequences of 2048 tokens, except for heads, which are narrow.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.lint_kernels.compile import CHIPS, kind_of, resident
from benchmarks.lint_kernels.record import Launch, recorded_launches
from fuselayers import ops
from fuselayers.cli.bench.cases import Settings, dtype_name, op_case

ROWS: Final = 1 << 13
_META: Final = torch.device("meta")


@dataclass(frozen=True)
class Case:
    """One call of an op, and of its gradients.

    Attributes:
        op: its name in `fuselayers.ops`.
        name: of the variant.
        width: N.
        dtype: of all floating tensors.
        call: makes the call with `width` and `dtype`, on the Triton backend.
        daily: whether it is of the small set that launches every kernel; the command compiles every case.
    """

    op: str
    name: str
    width: int
    dtype: torch.dtype
    call: Callable[["Case"], object]
    daily: bool = False

    @property
    def title(self) -> str:
        """A unique name."""
        return f"{self.op} {self.name + ' ' if self.name else ''}{self.width} {dtype_name(self.dtype)}"

    def tensor(self, *shape: int) -> Tensor:
        """A tensor that needs a gradient."""
        return torch.empty(shape, dtype=self.dtype, device=_META, requires_grad=True)


def launches_of(case: Case, arch: str = "sm_90") -> list[Launch]:
    """The launches of a case's call and of its gradients, without duplicates."""
    recorded = recorded_launches(processors=CHIPS[arch].processors, resident=lambda launch: resident(launch, arch))
    with recorded as launches, torch.enable_grad():
        result: Any = case.call(case)
        results = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward(results, [torch.empty_like(output) for output in results])
    return list({kind_of(launch): launch for launch in launches}.values())


def _tensors(case: Case) -> dict[str, Tensor]:
    """The inputs that an op has in a model and not in `bench`."""
    if case.name == "silu, packed":
        return {"gate": case.tensor(ROWS, 2 * case.width)}
    return {"weight": case.tensor(32_000, case.width)} if case.op == "linear_cross_entropy" else {}


def _op(case: Case, *, without: str = "", **settings: Any) -> object:
    """Call an op as `bench` does, except for the input `without`."""
    form = op_case(case.op, Settings((ROWS, case.width), case.dtype, _META, **settings))
    tensors = {name: value for name, value in form.tensors.items() if name != without} | _tensors(case)
    seed = {"seed": torch.empty((), dtype=torch.int64, device=_META)} if "p" in form.options else {}
    return form.op(**tensors, **form.options, **seed, backend="triton")


def _rotary(case: Case, **options: Any) -> object:
    heads = [case.tensor(8, ROWS // 8, number, case.width).transpose(1, 2) for number in (32, 8)]
    tables = (torch.empty(ROWS // 8, case.width // 2, device=_META) for _ in range(2))
    return ops.rotary(*heads, *tables, **options, backend="triton")


def _attention(case: Case, *, bias: bool = False, **options: Any) -> object:
    q, k, v = (case.tensor(8, ROWS // 8, number, case.width).transpose(1, 2) for number in (16, 4, 4))
    seed = torch.empty((), dtype=torch.int64, device=_META) if options.get("p") else None
    added = case.tensor(16, ROWS // 8, ROWS // 8) if bias else None
    return ops.attention(q, k, v, causal=True, bias=added, seed=seed, **options, backend="triton")


def _mask(case: Case) -> object:
    seed = torch.empty((), dtype=torch.int64, device=_META)
    return ops.dropout(case.tensor(ROWS, case.width), 0.1, seed=seed, backend="eager")


_16: Final = (torch.bfloat16,)
_16_AND_32: Final = (torch.bfloat16, torch.float32)
_ALL: Final = (torch.float32, torch.bfloat16, torch.float16)


def _cases(
    op: str,
    name: str,
    call: Callable[[Case], object],
    *widths: int,
    dtypes: Iterable[torch.dtype] = _16,
    daily: Iterable[int] = (),
) -> Iterator[Case]:
    """A case for every width and dtype; those in bfloat16 of a width in `daily` are of the small set."""
    for width in widths:
        for dtype in dtypes:
            yield Case(op, name, width, dtype, call, width in daily and dtype == torch.bfloat16)


CASES: Final[tuple[Case, ...]] = (
    *_cases("dropout", "", _op, 4096, dtypes=_16_AND_32, daily=(4096,)),
    *_cases("dropout", "mask", _mask, 4096, daily=(4096,)),
    *_cases("bias_activation_dropout", "gelu", _op, 4096, dtypes=_ALL, daily=(4096,)),
    *(
        case
        for name in ops.ACTIVATIONS
        if name != "gelu"
        for case in _cases("bias_activation_dropout", name, partial(_op, activation=name), 4096)
    ),
    *_cases("bias_activation_dropout", "gelu, p=0", partial(_op, dropout=0.0), 4096),
    *_cases("bias_activation_dropout", "gelu, no bias", partial(_op, bias=False), 4096),
    # The second width is a multiple of 8, and of no higher power of two.
    *_cases("bias_dropout_residual", "", _op, 4096, 1000, dtypes=_16_AND_32, daily=(1000,)),
    *_cases("gated_activation", "silu", partial(_op, activation="silu"), 4096, dtypes=_16_AND_32, daily=(4096,)),
    *_cases("gated_activation", "silu, packed", partial(_op, activation="silu", without="up"), 4096),
    *_cases("gated_activation", "gelu", _op, 4096),
    *_cases(
        *("bias_dropout_residual_layer_norm", "prenorm", partial(_op, style="prenorm"), 1024, 4096, 8192),
        dtypes=_16_AND_32,
        daily=(4096,),
    ),
    *_cases("bias_dropout_residual_rms_norm", "pre", partial(_op, style="pre"), 4096, 8192),
    *_cases("residual_layer_norm", "", partial(_op, without="bias"), 4096, 8192),
    *_cases("residual_rms_norm", "", _op, 4096, 8192),
    *_cases("layer_norm", "", partial(_op, without="bias"), 4096, 8192),
    *_cases("rms_norm", "", _op, 1024, 4096, 8192, 12288, daily=(4096,)),
    *_cases("attention", "dropout", partial(_attention, p=0.1), 64, 128, dtypes=_16_AND_32, daily=(64,)),
    *_cases("attention", "window, cap", partial(_attention, window=512, soft_cap=50.0), 128),
    *_cases("attention", "bias", partial(_attention, bias=True), 64, daily=(64,)),
    *_cases("cross_entropy", "", _op, 32_000, 50_257, dtypes=_16_AND_32, daily=(32_000, 50_257)),
    *_cases("linear_cross_entropy", "", _op, 4096),
    *_cases("rotary", "", _rotary, 64, 128, dtypes=_16_AND_32, daily=(128,)),
    *_cases("rotary", "interleaved", partial(_rotary, interleaved=True), 128),
)
"""Ordered by op; every kernel of `fuselayers.ops` is launched by one of them, which a test checks."""
