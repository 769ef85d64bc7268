"""bias_dropout_residual_rms_norm -- dropout of a sublayer's output, the residual sum and an RMS norm.

    x, residual, y, s         [..., N]   any float dtype
    weight, bias              [N]        bias optional
    seed                      []         int64

The three arrangements of `style` are those of bias_dropout_residual_layer_norm. See `normalise.formula` for gradients,
dtypes, saved tensors and bytes moved.
"""

from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from .draw import seed_or_draw
from .normalise import NormStyle, RmsNormOptions, check_style, dropped_norm_reference, normalise
from .shapes import check_floating, check_like, check_row_vector, check_rows
from .shards import Shard

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["bias_dropout_residual_rms_norm", "bias_dropout_residual_rms_norm_reference"]


@overload
def bias_dropout_residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    style: Literal["post", "pre"] = "post",
    **options: "Unpack[RmsNormOptions]",
) -> Tensor: ...
@overload
def bias_dropout_residual_rms_norm(
    x: Tensor, residual: Tensor, *, weight: Tensor, style: Literal["prenorm"], **options: "Unpack[RmsNormOptions]"
) -> tuple[Tensor, Tensor]: ...
@overload
def bias_dropout_residual_rms_norm(
    x: Tensor, residual: Tensor, *, weight: Tensor, style: NormStyle, **options: "Unpack[RmsNormOptions]"
) -> Tensor | tuple[Tensor, Tensor]: ...
def bias_dropout_residual_rms_norm(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-6,
    style: NormStyle = "post",
    training: bool = True,
    seed: Tensor | None = None,
    shard: Shard | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Return norm(dropout(x + bias, p) + residual), in the arrangement that `style` names.

    Args:
        x: [..., N], the sublayer's output, any float dtype.
        residual: [..., N], the residual stream.
        weight: [N], the norm's scale.
        bias: [N], added to x, or None for none.
        p: dropout probability, 0 <= p <= 1.
        eps: added to the mean square.
        style: "post", "pre" or "prenorm", as in bias_dropout_residual_layer_norm; "prenorm" returns two tensors.
        training: False drops nothing.
        seed: int64 tensor of shape [] on x's device, which fixes the mask; drawn from torch's generator when None.
        shard: the position of x, in whole rows, in a larger tensor, whose mask it uses; None if x is the whole tensor.
        backend: see `fuselayers.ops.implementations.dispatch`.

    Raises:
        ValueError: x has no dimension, an argument does not fit it, the style or the backend is unknown, p is
            outside [0, 1], or eps is negative or not finite.
        TypeError: a tensor is not dense and floating, the seed is not a tensor, p or eps is a tensor, or the style is
            not a string.
        RuntimeError: without a seed, inside a `torch.vmap` whose `randomness` is "error", which is its default; or the
            requested backend cannot take the call.

    >>> import torch
    >>> x, residual = torch.tensor([1.0, 2.0]), torch.tensor([2.0, -5.0])
    >>> bias_dropout_residual_rms_norm(x, residual, weight=torch.ones(2)).round(decimals=3)
    tensor([ 1., -1.])
    """
    check_rows("x", x)
    check_like("residual", residual, x)
    check_floating("weight", weight)
    for name, vector in (("weight", weight), ("bias", bias)):
        check_row_vector(name, vector, x)
    check_style(style)
    results = normalise(
        x,
        residual,
        bias=bias,
        weight=weight,
        seed=seed_or_draw(x, p, training=training, seed=seed),
        shard=shard,
        p=p,
        eps=eps,
        pre=style == "pre",
        rms=True,
        backend=backend,
    )
    return results if style == "prenorm" else results[0]


def bias_dropout_residual_rms_norm_reference(
    x: Tensor,
    residual: Tensor,
    *,
    weight: Tensor,
    bias: Tensor | None = None,
    p: float = 0.0,
    eps: float = 1e-6,
    style: NormStyle = "post",
    seed: Tensor | None = None,
    shard: Shard | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition of the op in training, in plain torch; without a seed nothing is dropped."""
    return dropped_norm_reference(
        x, residual, bias, weight, None, p=p, eps=eps, style=style, seed=seed, shard=shard, rms=True
    )
