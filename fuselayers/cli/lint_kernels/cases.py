"""What `fuselayers lint-kernels` compiles: a call of each op, as a model makes it, forward and backward.

Whoever adds an op with kernels adds it to `CASES`. The calls are made on meta tensors, which have no memory; the
kernels that they would launch are compiled as they would be launched.

The shapes are [16384, N], say 8 sequences of 2048 tokens, but for heads, which are narrow.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from ... import ops
from ...ops.implementations.launch import Launch, recorded_launches

__all__ = ["CASES", "Case", "kind_of", "launches_of"]

_ROWS: Final = 1 << 14
_NAMES: Final = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Case:
    """One call of an op, and of its gradients.

    Attributes:
        op: its name in `fuselayers.ops`.
        name: says what is special about the call.
        width: N.
        dtype: of all its floating tensors.
        call: makes the call, of `width` and `dtype`, with the option backend="triton".
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
        return f"{self.op} {self.name + ' ' if self.name else ''}{self.width} {_NAMES[self.dtype]}"

    def tensor(self, *shape: int) -> Tensor:
        """One that needs a gradient."""
        return torch.empty(shape, dtype=self.dtype, device="meta", requires_grad=True)

    def rows(self, width: int | None = None) -> Tensor:
        """[R, N]."""
        return self.tensor(_ROWS, self.width if width is None else width)

    def vector(self) -> Tensor:
        """[N]."""
        return self.tensor(self.width)


def launches_of(case: Case) -> list[Launch]:
    """The launches of a case's call and of its gradients, those of the same kernel for the same arguments once."""
    with recorded_launches() as launches, torch.enable_grad():
        result: Any = case.call(case)
        results = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward(results, [torch.empty_like(one) for one in results])
    return list({kind_of(launch): launch for launch in launches}.values())


def kind_of(launch: Launch) -> tuple[Any, ...]:
    """What a launch is compiled for; equal for launches that run the same code."""
    arguments = (one.dtype if isinstance(one, Tensor) else type(one) for one in launch.arguments)
    return launch.function, launch.constants, launch.num_warps, launch.num_stages, *arguments


def _seed() -> Tensor:
    return torch.empty((), dtype=torch.int64, device="meta")


def _dropout(case: Case) -> Tensor:
    return ops.dropout(case.rows(), 0.1, seed=_seed(), backend="triton")


def _bias_activation_dropout(activation: str | None, *, bias: bool = True, p: float = 0.1) -> Callable[[Case], Tensor]:
    def call(case: Case) -> Tensor:
        return ops.bias_activation_dropout(
            *(case.rows(), case.vector() if bias else None),
            activation=activation,
            p=p,
            seed=_seed(),
            backend="triton",
        )

    return call


def _bias_dropout_residual(case: Case) -> Tensor:
    return ops.bias_dropout_residual(
        case.rows(), case.rows(), bias=case.vector(), p=0.1, seed=_seed(), backend="triton"
    )


def _gated_activation(activation: str, *, packed: bool = False) -> Callable[[Case], Tensor]:
    def call(case: Case) -> Tensor:
        gate, up = (case.rows(2 * case.width), None) if packed else (case.rows(), case.rows())
        return ops.gated_activation(gate, up, activation=activation, backend="triton")

    return call


def _bias_dropout_residual_norm(op: Callable[..., Any], *, style: str, **biases: bool) -> Callable[[Case], object]:
    def call(case: Case) -> object:
        return op(
            *(case.rows(), case.rows()),
            weight=case.vector(),
            bias=case.vector(),
            **{name: case.vector() for name in biases},
            p=0.1,
            style=style,
            seed=_seed(),
            backend="triton",
        )

    return call


def _residual_norm(op: Callable[..., Any]) -> Callable[[Case], object]:
    return lambda case: op(case.rows(), case.rows(), weight=case.vector(), backend="triton")


def _norm(op: Callable[..., Any]) -> Callable[[Case], object]:
    return lambda case: op(case.rows(), weight=case.vector(), backend="triton")


def _softmax(*, causal: bool = False, masked: bool = False) -> Callable[[Case], Tensor]:
    def call(case: Case) -> Tensor:
        scores = case.tensor(_ROWS // case.width, case.width, case.width)
        mask = torch.empty(len(scores), 1, case.width, dtype=torch.bool, device="meta") if masked else None
        return ops.softmax(scores, mask, causal=causal, scale=0.1, backend="triton")

    return call


def _target() -> Tensor:
    return torch.empty(_ROWS, dtype=torch.int64, device="meta")


def _cross_entropy(case: Case) -> Tensor:
    return ops.cross_entropy(case.rows(), _target(), backend="triton")


def _linear_cross_entropy(case: Case) -> Tensor:
    return ops.linear_cross_entropy(case.rows(), case.tensor(32_000, case.width), _target(), backend="triton")


def _linear_activation(activation: str | None) -> Callable[[Case], Tensor]:
    def call(case: Case) -> Tensor:
        weight, bias = case.tensor(4 * case.width, case.width), case.tensor(4 * case.width)
        return ops.linear_activation(case.rows(), weight, bias, activation=activation, backend="triton")

    return call


def _rotary(*, interleaved: bool = False) -> Callable[[Case], object]:
    def call(case: Case) -> object:
        heads = [case.tensor(8, _ROWS // 8, number, case.width).transpose(1, 2) for number in (32, 8)]
        tables = (torch.empty(_ROWS // 8, case.width // 2, device="meta") for _ in range(2))
        return ops.rotary(*heads, *tables, interleaved=interleaved, backend="triton")

    return call


def _each(
    op: str,
    name: str,
    call: Callable[[Case], object],
    *widths: int,
    dtypes: Iterable[torch.dtype] = (torch.bfloat16,),
    daily: Iterable[int] = (),
) -> Iterator[Case]:
    """A case for every width and dtype; those in bfloat16 of a width in `daily` are compiled by `make test`."""
    for width in widths:
        for dtype in dtypes:
            yield Case(op, name, width, dtype, call, width in daily and dtype == torch.bfloat16)


_WIDTHS: Final = (1024, 4096, 8192, 12288)
_WIDE_TOO: Final = (torch.bfloat16, torch.float32)
CASES: Final[tuple[Case, ...]] = (
    *_each("dropout", "", _dropout, 4096, dtypes=_WIDE_TOO, daily=(4096,)),
    *_each(
        *("bias_activation_dropout", "gelu", _bias_activation_dropout("gelu"), 4096),
        dtypes=_NAMES,
        daily=(4096,),
    ),
    *(
        case
        for name in ops.ACTIVATIONS
        if name != "gelu"
        for case in _each("bias_activation_dropout", name, _bias_activation_dropout(name), 4096)
    ),
    *_each("bias_activation_dropout", "gelu, p=0", _bias_activation_dropout("gelu", p=0.0), 4096),
    *_each("bias_activation_dropout", "gelu, no bias", _bias_activation_dropout("gelu", bias=False), 4096),
    # The second width is a multiple of 8, and of no higher power of two.
    *_each(
        *("bias_dropout_residual", "", _bias_dropout_residual, 4096, 1000),
        dtypes=_WIDE_TOO,
        daily=(1000,),
    ),
    *_each("gated_activation", "silu", _gated_activation("silu"), 4096, dtypes=_WIDE_TOO, daily=(4096,)),
    *_each("gated_activation", "silu, packed", _gated_activation("silu", packed=True), 4096),
    *_each("gated_activation", "gelu", _gated_activation("gelu"), 4096),
    *_each(
        "bias_dropout_residual_layer_norm",
        "prenorm",
        _bias_dropout_residual_norm(ops.bias_dropout_residual_layer_norm, style="prenorm", norm_bias=True),
        *_WIDTHS,
        dtypes=_WIDE_TOO,
        daily=(4096, 12288),
    ),
    *_each(
        "bias_dropout_residual_rms_norm",
        "pre",
        _bias_dropout_residual_norm(ops.bias_dropout_residual_rms_norm, style="pre"),
        *(4096, 8192),
    ),
    *_each("residual_layer_norm", "", _residual_norm(ops.residual_layer_norm), 4096, 8192),
    *_each("residual_rms_norm", "", _residual_norm(ops.residual_rms_norm), 4096, 8192),
    *_each("layer_norm", "", _norm(ops.layer_norm), 4096, 8192),
    *_each("rms_norm", "", _norm(ops.rms_norm), *_WIDTHS, daily=(4096,)),
    *_each("softmax", "", _softmax(), 2048, 16384, dtypes=_WIDE_TOO, daily=(2048, 16384)),
    *_each("softmax", "causal", _softmax(causal=True), 2048, 16384),
    *_each("softmax", "masked", _softmax(masked=True), 2048),
    *_each("cross_entropy", "", _cross_entropy, 32_000, dtypes=_WIDE_TOO, daily=(32_000,)),
    *_each("linear_cross_entropy", "", _linear_cross_entropy, 4096),
    *_each("linear_activation", "gelu", _linear_activation("gelu"), 4096, dtypes=_WIDE_TOO, daily=(4096,)),
    *_each("rotary", "", _rotary(), 64, 128, dtypes=_WIDE_TOO, daily=(128,)),
    *_each("rotary", "interleaved", _rotary(interleaved=True), 128),
)
"""Ordered by op; every kernel of `fuselayers.ops` is launched by one of them, which a test checks."""
