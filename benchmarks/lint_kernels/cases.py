"""The cases of `benchmarks.lint_kernels`: a call of each op, as a model makes it, forward and backward.

Add an op with kernels to `CASES`. The calls run on meta tensors, which have no memory; the kernels that they would
launch are compiled with the same arguments.

The shapes are [8192, N], say 4 sequences of 2048 tokens, except for heads, which are narrow.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks.lint_kernels.compile import kind_of, resident
from benchmarks.lint_kernels.roofline import CHIPS
from fuselayers import ops
from fuselayers._torch.dispatch import pytree
from fuselayers.cli.bench.cases import OpCase, Settings, dtype_name, op_case
from fuselayers.ops.implementations.launch import Launch, recorded_launches

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
        daily: whether `make test` compiles it, for sm_90; the slow tests and the command compile every case.
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

    @property
    def floor(self) -> tuple[float, float] | None:
        """The least bytes that forward and backward move; None for ops that memory bandwidth does not limit."""
        if not isinstance(self.call, _OpCall):
            return None
        floor = self.call.floor(self)
        size = ROWS * self.width * self.dtype.itemsize
        return None if floor is None else (floor[0] * size, floor[1] * size)

    def tensor(self, *shape: int) -> Tensor:
        """A tensor that needs a gradient."""
        return torch.empty(shape, dtype=self.dtype, device=_META, requires_grad=True)


Step = Launch | int
"""One step of a GPU: one of our kernels, or a kernel of torch, as the bytes that it moves."""


def steps_of(case: Case, arch: str) -> tuple[list[Step], list[Step]]:
    """The steps of a case's call, and of its gradients."""
    others: list[Step] = []

    def see(func: Any, arguments: tuple[Any, ...], result: Any) -> None:
        given = [one for one in pytree.tree_leaves(arguments) if isinstance(one, Tensor)]
        made = [one for one in pytree.tree_leaves(result) if isinstance(one, Tensor)]
        # A view has no kernel, nor has a new tensor that is not filled; a cast has one unless it returns its argument.
        is_view = not func.name().startswith("aten::to.") and any(one.alias_info for one in func._schema.returns)
        if made and not is_view and "empty" not in func.name() and not any(one is made[0] for one in given):
            others.append(sum(one.nbytes for one in (*given, *made)))

    call = case.call.prepare(case) if isinstance(case.call, _OpCall) else partial(case.call, case)
    processors = CHIPS[arch].processors
    recorded = recorded_launches(processors=processors, resident=lambda one: resident(one, arch), see=see)
    with recorded as launches, torch.enable_grad():
        result: Any = call()
        results = result if isinstance(result, tuple) else (result,)
        gradients = [torch.empty_like(one) for one in results]
        first, first_others = len(launches), len(others)
        torch.autograd.backward(results, gradients)
    return [*launches[:first], *others[:first_others]], [*launches[first:], *others[first_others:]]


def launches_of(case: Case, arch: str = "sm_90") -> list[Launch]:
    """The launches of a case's call and of its gradients, without duplicates."""
    forward, backward = steps_of(case, arch)
    return list({kind_of(one): one for one in (*forward, *backward) if isinstance(one, Launch)}.values())


def _tensors(case: Case) -> dict[str, Tensor]:
    """The inputs that an op has in a model and not in `bench`."""
    if case.name == "silu, packed":
        return {"gate": case.tensor(ROWS, 2 * case.width)}
    return {"weight": case.tensor(32_000, case.width)} if case.op == "linear_cross_entropy" else {}


def call_of(found: OpCase) -> Callable[[], object]:
    """Return the call of a case of `bench` on meta tensors, with kernels."""
    seed = {"seed": torch.empty((), dtype=torch.int64, device=_META)} if "p" in found.options else {}
    return partial(found.op, **found.tensors, **found.options, **seed, backend="triton")


class _OpCall:
    """A call of an op as `bench` makes it, except for the inputs in `without`."""

    def __init__(self, *without: str, settings: dict[str, Any] | None = None) -> None:
        self.without = without
        self.settings = {"dropout": 0.1, "activation": "gelu", **(settings or {})}

    def found(self, case: Case) -> OpCase:
        return op_case(case.op, Settings((ROWS, case.width), dtype=case.dtype, device=_META, **self.settings))

    def __call__(self, case: Case) -> object:
        return self.prepare(case)()

    def prepare(self, case: Case) -> Callable[[], object]:
        """Return the call, with its inputs."""
        found = self.found(case)
        tensors = {name: value for name, value in found.tensors.items() if name not in self.without} | _tensors(case)
        return call_of(replace(found, tensors=tensors))

    def floor(self, case: Case) -> tuple[float, float] | None:
        """As `OpCase.floor`."""
        return self.found(case).floor


class _Rotary(_OpCall):
    heads = (32, 8)

    def __init__(self, *, interleaved: bool = False) -> None:
        super().__init__()
        self.interleaved = interleaved

    def prepare(self, case: Case) -> Callable[[], object]:
        heads = [case.tensor(8, ROWS // 8, number, case.width).transpose(1, 2) for number in self.heads]
        tables = (torch.empty(ROWS // 8, case.width // 2, device=_META) for _ in range(2))
        return partial(ops.rotary, *heads, *tables, interleaved=self.interleaved, backend="triton")

    def floor(self, case: Case) -> tuple[float, float]:
        return 2 * sum(self.heads), 2 * sum(self.heads)


def _mask(case: Case) -> object:
    seed = torch.empty((), dtype=torch.int64, device=_META)
    return ops.dropout(case.tensor(ROWS, case.width), 0.1, seed=seed, backend="eager")


_16: Final = (torch.bfloat16,)
_16_AND_32: Final = (torch.bfloat16, torch.float32)
_ALL: Final = (torch.float32, torch.bfloat16, torch.float16)


def _each(
    op: str,
    name: str,
    call: Callable[[Case], object],
    *widths: int,
    dtypes: Iterable[torch.dtype] = _16,
    daily: Iterable[int] = (),
) -> Iterator[Case]:
    """A case for every width and dtype; `make test` compiles those in bfloat16 of a width in `daily`."""
    for width in widths:
        for dtype in dtypes:
            yield Case(op, name, width, dtype, call, width in daily and dtype == torch.bfloat16)


def _activation(name: str, *without: str, **settings: Any) -> _OpCall:
    return _OpCall(*without, settings={"activation": name, **settings})


def _style(name: str) -> _OpCall:
    return _OpCall(settings={"style": name})


_GELU: Final = _activation("gelu")
CASES: Final[tuple[Case, ...]] = (
    *_each("dropout", "", _OpCall(), 4096, dtypes=_16_AND_32, daily=(4096,)),
    *_each("dropout", "mask", _mask, 4096, daily=(4096,)),
    *_each("bias_activation_dropout", "gelu", _GELU, 4096, dtypes=_ALL, daily=(4096,)),
    *(
        case
        for name in ops.ACTIVATIONS
        if name != "gelu"
        for case in _each("bias_activation_dropout", name, _activation(name), 4096)
    ),
    *_each("bias_activation_dropout", "gelu, p=0", _activation("gelu", dropout=0.0), 4096),
    *_each("bias_activation_dropout", "gelu, no bias", _activation("gelu", bias=False), 4096),
    # The second width is a multiple of 8, and of no higher power of two.
    *_each("bias_dropout_residual", "", _OpCall(), 4096, 1000, dtypes=_16_AND_32, daily=(1000,)),
    *_each("gated_activation", "silu", _activation("silu"), 4096, dtypes=_16_AND_32, daily=(4096,)),
    *_each("gated_activation", "silu, packed", _activation("silu", "up"), 4096),
    *_each("gated_activation", "gelu", _GELU, 4096),
    *_each(
        *("bias_dropout_residual_layer_norm", "prenorm", _style("prenorm"), 1024, 4096, 8192, 12288),
        dtypes=_16_AND_32,
        daily=(4096, 12288),
    ),
    *_each("bias_dropout_residual_rms_norm", "pre", _style("pre"), 4096, 8192),
    *_each("residual_layer_norm", "", _OpCall("bias"), 4096, 8192),
    *_each("residual_rms_norm", "", _OpCall(), 4096, 8192),
    *_each("layer_norm", "", _OpCall("bias"), 4096, 8192),
    *_each("rms_norm", "", _OpCall(), 1024, 4096, 8192, 12288, daily=(4096,)),
    *_each("cross_entropy", "", _OpCall(), 32_000, 50_257, dtypes=_16_AND_32, daily=(32_000, 50_257)),
    *_each("linear_cross_entropy", "", _OpCall(), 4096),
    *_each("rotary", "", _Rotary(), 64, 128, dtypes=_16_AND_32, daily=(128,)),
    *_each("rotary", "interleaved", _Rotary(interleaved=True), 128),
)
"""Ordered by op; every kernel of `fuselayers.ops` is launched by one of them, which a test checks."""
