"""The base of the norms, which also join a sublayer's output to the residual stream.

x, residual, y, s   [..., N]
bias                [N]
"""

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor, nn

from ...ops import NormStyle, bias_dropout_residual, check_style, dropout
from ...ops.shapes import check_like, check_row_vector, check_rows
from ..hooks import has_hooks

__all__ = ["Norm", "join"]


class Norm(nn.Module):
    """The base of the norms: a subclass has `forward`, and may have a fused `_join`.

    The styles are those of `ops.bias_dropout_residual_layer_norm`; with d = dropout(x + bias, p) and s = d + residual:
    "post" is norm(s), "pre" is norm(d) + residual, "prenorm" is the pair (norm(s), s).
    """

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Fill a `weight` with ones and a `bias` with zeros.

        `initialise` calls it; a norm with other initial values overrides it.
        """
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            parameter = getattr(self, name, None)
            if parameter is not None:
                parameter.fill_(value)

    @overload
    def add(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        bias: Tensor | None = None,
        p: float = 0.0,
        style: Literal["prenorm"] = "prenorm",
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def add(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        bias: Tensor | None = None,
        p: float = 0.0,
        style: Literal["post", "pre"],
    ) -> Tensor: ...
    def add(
        self,
        x: Tensor,
        residual: Tensor,
        *,
        bias: Tensor | None = None,
        p: float = 0.0,
        style: NormStyle = "prenorm",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return dropout(x + bias, p), joined to `residual` and normalised as `style` says.

        Args:
            x: [..., N], a sublayer's output.
            residual: [..., N], the stream it joins.
            bias: [N], added to x, or None for none.
            p: dropout probability, 0 <= p < 1; nothing is dropped in eval mode.
            style: "prenorm" returns (norm(s), s), "post" and "pre" one tensor.

        Raises:
            ValueError: a shape does not fit x, the style is unknown, or p is outside [0, 1).
            TypeError: x, residual or bias is no floating-point tensor.
        """
        check_style(style)
        # Checked for every norm and style: a plain sum would broadcast.
        check_rows("x", x)
        check_like("residual", residual, x)
        check_row_vector("bias", bias, x)
        if has_hooks(self):  # a fused op would use the weights of the norm without calling it
            return Norm._join(self, x, residual, bias, p, style)
        return self._join(x, residual, bias, p, style)

    def _join(
        self, x: Tensor, residual: Tensor, bias: Tensor | None, p: float, style: NormStyle
    ) -> Tensor | tuple[Tensor, Tensor]:
        return join(self, x, residual, bias, p=p, style=style, training=self.training)


def join(
    norm: Callable[[Tensor], Tensor],
    x: Tensor,
    residual: Tensor,
    bias: Tensor | None,
    *,
    p: float,
    style: NormStyle,
    training: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `Norm.add` with a norm that is called. Used by `Norm`, and by a fused layer whose norm has hooks.

    >>> join(torch.neg, torch.ones(2), torch.ones(2), None, p=0.0, style="pre", training=True)
    tensor([0., 0.])
    """
    if style == "pre":
        return norm(dropout(x if bias is None else x + bias, p, training=training)) + residual
    total = bias_dropout_residual(x, residual, bias=bias, p=p, training=training)
    normed = norm(total)
    return (normed, total) if style == "prenorm" else normed
