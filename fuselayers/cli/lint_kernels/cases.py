"""What `fuselayers lint-kernels` compiles: a call of each op, as a model makes it, forward and backward.

Add an op with kernels to `CASES`. The calls run on meta tensors, which have no memory; the kernels that they would
launch are compiled with the same arguments.

The shapes are [16384, N], say 8 sequences of 2048 tokens, except for heads, which are narrow.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ... import ops
from ...ops.implementations.launch import Launch, recorded_launches
from ..bench.cases import Settings, dtype_name, op_case

ROWS: Final = 1 << 14
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

    def tensor(self, *shape: int) -> Tensor:
        """A tensor that needs a gradient."""
        return torch.empty(shape, dtype=self.dtype, device=_META, requires_grad=True)


def launches_of(case: Case) -> list[Launch]:
    """The launches of a case's call and of its gradients, without duplicates."""
    with recorded_launches() as launches, torch.enable_grad():
        result: Any = case.call(case)
        results = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward(results, [torch.empty_like(one) for one in results])
    return list({kind_of(launch): launch for launch in launches}.values())


def kind_of(launch: Launch) -> tuple[Any, ...]:
    """A key of the code of a launch; launches with equal keys run the same code."""
    arguments = (one.dtype if isinstance(one, Tensor) else type(one) for one in launch.arguments)
    return launch.function, launch.constants, launch.num_warps, launch.num_stages, *arguments


def _tensors(case: Case) -> dict[str, Tensor]:
    """The inputs that an op has in a model and not in `bench`."""
    if case.op == "softmax":
        scores = case.tensor(ROWS // case.width, case.width, case.width)
        mask = torch.empty(len(scores), 1, case.width, dtype=torch.bool, device=_META)
        return {"scores": scores, "mask": mask} if case.name == "masked" else {"scores": scores}
    if case.name == "silu, packed":
        return {"gate": case.tensor(ROWS, 2 * case.width)}
    return {"weight": case.tensor(32_000, case.width)} if case.op == "linear_cross_entropy" else {}


def _call(*without: str, settings: dict[str, Any] | None = None, **options: Any) -> Callable[[Case], object]:
    """Call an op as `bench` does, except for the inputs in `without`; `options` are the op's own."""

    def call(case: Case) -> object:
        chosen = {"dropout": 0.1, "activation": "gelu", **(settings or {})}
        found = op_case(case.op, Settings((ROWS, case.width), dtype=case.dtype, device=_META, **chosen))
        tensors = {name: value for name, value in found.tensors.items() if name not in without} | _tensors(case)
        if "p" in found.options:
            tensors["seed"] = torch.empty((), dtype=torch.int64, device=_META)
        return found.op(**tensors, **found.options, **options, backend="triton")

    return call


def _rotary(*, interleaved: bool = False) -> Callable[[Case], object]:
    def call(case: Case) -> object:
        heads = [case.tensor(8, ROWS // 8, number, case.width).transpose(1, 2) for number in (32, 8)]
        tables = (torch.empty(ROWS // 8, case.width // 2, device=_META) for _ in range(2))
        return ops.rotary(*heads, *tables, interleaved=interleaved, backend="triton")

    return call


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


def _activation(name: str, *without: str, **settings: Any) -> Callable[[Case], object]:
    return _call(*without, settings={"activation": name, **settings})


def _style(name: str) -> Callable[[Case], object]:
    return _call(settings={"style": name})


_GELU: Final = _activation("gelu")
CASES: Final[tuple[Case, ...]] = (
    *_each("dropout", "", _call(), 4096, dtypes=_16_AND_32, daily=(4096,)),
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
    *_each("bias_dropout_residual", "", _call(), 4096, 1000, dtypes=_16_AND_32, daily=(1000,)),
    *_each("gated_activation", "silu", _activation("silu"), 4096, dtypes=_16_AND_32, daily=(4096,)),
    *_each("gated_activation", "silu, packed", _activation("silu", "up"), 4096),
    *_each("gated_activation", "gelu", _GELU, 4096),
    *_each(
        *("bias_dropout_residual_layer_norm", "prenorm", _style("prenorm"), 1024, 4096, 8192, 12288),
        dtypes=_16_AND_32,
        daily=(4096, 12288),
    ),
    *_each("bias_dropout_residual_rms_norm", "pre", _style("pre"), 4096, 8192),
    *_each("residual_layer_norm", "", _call("bias"), 4096, 8192),
    *_each("residual_rms_norm", "", _call(), 4096, 8192),
    *_each("layer_norm", "", _call("bias"), 4096, 8192),
    *_each("rms_norm", "", _call(), 1024, 4096, 8192, 12288, daily=(4096,)),
    *_each("softmax", "", _call(scale=0.1), 2048, 16384, dtypes=_16_AND_32, daily=(2048, 16384)),
    *_each("softmax", "causal", _call(scale=0.1, causal=True), 2048, 16384),
    *_each("softmax", "masked", _call(scale=0.1), 2048),
    *_each("cross_entropy", "", _call(), 32_000, dtypes=_16_AND_32, daily=(32_000,)),
    *_each("linear_cross_entropy", "", _call(), 4096),
    *_each("linear_activation", "gelu", _GELU, 4096, dtypes=_16_AND_32, daily=(4096,)),
    *_each("rotary", "", _rotary(), 64, 128, dtypes=_16_AND_32, daily=(128,)),
    *_each("rotary", "interleaved", _rotary(interleaved=True), 128),
)
"""Ordered by op; every kernel of `fuselayers.ops` is launched by one of them, which a test checks."""
