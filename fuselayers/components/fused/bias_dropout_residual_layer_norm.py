"""bias_dropout_residual_layer_norm -- norm(dropout(x + bias, p) + residual), as a layer with its own bias and norm.

x, residual, y   [..., N]
bias             [N]
norm             weight [N], bias [N]
"""

from torch import Tensor

from ...ops import NormStyle, bias_dropout_residual_layer_norm, check_style
from ..hooks import has_hooks
from ..norm import LayerNorm
from ..norm.norm import join
from ..ranges import NotNegative, Probability, Size, in_range
from ..registry import register
from .biased_op import BiasedOp

__all__ = ["FusedBiasDropoutResidualLayerNorm"]


@register("fused", "bias_dropout_residual_layer_norm")
class FusedBiasDropoutResidualLayerNorm(BiasedOp):
    """Bias, dropout, the residual sum and a layer norm in one op.

    With d = dropout(x + bias, p) and s = d + residual, the style "post" is norm(s), "pre" is norm(d) + residual and
    "prenorm" is the pair (norm(s), s).

    The bias keeps its dtype: under autocast, where x is bfloat16, a float32 bias makes s and the results float32, as
    torch's layer norm does on a GPU.

    The op includes the norm while `norm` is an unmodified `LayerNorm`. Another module in its place, or one with hooks,
    is called after the other ops, with the same dropout mask.

    Args:
        p: dropout probability, 0 <= p < 1.
        d_model: N, the size of the last dimension and of the norm's parameters.
        bias_shape: N, the size of the bias, a parameter that starts at zero; None for no bias.
        style: "post", "pre" or "prenorm".
        eps: added to the variance.
        backend: None calls the op directly; a name sends it through `fuselayers.fuse` for that backend.
        partition: how `fuse` chooses what is saved for backward; without a backend it has no effect.

    Raises:
        ValueError: p is outside [0, 1), a size is below one, bias_shape is not d_model, or there is no such style,
            backend or partition.

    >>> import torch
    >>> layer = FusedBiasDropoutResidualLayerNorm(0.1, 2, style="prenorm", backend="eager")
    >>> normed, total = layer.eval()(torch.tensor([1.0, 2.0]), torch.tensor([10.0, 10.0]))
    >>> total.tolist()
    [11.0, 12.0]
    """

    @in_range
    def __init__(
        self,
        p: Probability,
        d_model: Size,
        *,
        bias_shape: Size | None = None,
        style: NormStyle = "post",
        eps: NotNegative = 1e-5,
        backend: str | None = "auto",
        partition: str = "min_cut",
    ) -> None:
        check_style(style)
        if bias_shape is not None and bias_shape != d_model:
            raise ValueError(f"bias_shape must be d_model {d_model} or None, got {bias_shape}")
        super().__init__(
            bias_dropout_residual_layer_norm, p=p, bias_shape=bias_shape, backend=backend, partition=partition
        )
        self.style: NormStyle = style
        self.norm = LayerNorm(d_model, eps=eps)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[..., N], [..., N] -> [..., N], or two of them for the style "prenorm"."""
        norm = self.norm
        # As Note [guards of a split linear] has it, for a norm.
        if type(norm) is not LayerNorm or "forward" in norm.__dict__ or has_hooks(norm):
            return join(norm, x, residual, self.bias, p=self.p, style=self.style, training=self.training)
        y: Tensor | tuple[Tensor, Tensor] = self._call(
            x,
            residual,
            bias=self.bias,
            weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
            style=self.style,
        )
        return y

    def extra_repr(self) -> str:
        return f"style={self.style!r}, {super().extra_repr()}"
