"""What attentions check of their input, and how they leave padding out.

x                  [B, T, D]        B batch, T tokens, D model
key_padding_mask   [B, T]           True for a real token
of heads           [B, H, T, C]     H heads, C channels of a head
"""

import torch
from torch import Tensor

__all__ = ["check_input", "zero_padding"]


def check_input(x_BTD: Tensor, hidden_dim: int, key_padding_mask: Tensor | None) -> None:
    """Raise ValueError unless x is [B, T, hidden_dim] and the mask, where there is one, fits it.

    Used by every attention that looks only at its own sequence.
    """
    if x_BTD.dim() != 3 or x_BTD.shape[-1] != hidden_dim:
        raise ValueError(f"x must be [B, T, {hidden_dim}], got {list(x_BTD.shape)}")
    mask = key_padding_mask
    if mask is not None and (mask.dtype != torch.bool or mask.shape != x_BTD.shape[:2]):
        raise ValueError(
            f"key_padding_mask must be torch.bool {list(x_BTD.shape[:2])} to fit x {list(x_BTD.shape)}, True for a "
            f"real token, got {mask.dtype} {list(mask.shape)}"
        )


def zero_padding(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return x, [B, T, D] or [B, H, T, C], with zeros where a token is padding.

    Used by the attentions that add tokens up, where a zero is as good as nothing.

    >>> zero_padding(torch.ones(1, 2, 3), torch.tensor([[True, False]]))
    tensor([[[1., 1., 1.],
             [0., 0., 0.]]])
    """
    if key_padding_mask is None:
        return x
    padding = ~key_padding_mask[..., None]
    return x.masked_fill(padding if x.dim() == 3 else padding[:, None], 0.0)
