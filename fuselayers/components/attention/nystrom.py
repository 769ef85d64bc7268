"""nystrom -- softmax attention by the Nystrom method: through M landmarks, which are means of queries and of keys.

    x, y      [B, T, D]      B batch, T tokens, D model
    q         [B, H, T, C]   H query heads, C channels of a head
    k, v      [B, G, T, C]   G key-value heads; query head h uses key-value head h // (H / G)
    q~, k~    [B, H, M, C]   the landmarks: means over M segments of tokens

    y = out(softmax(q k~^T / sqrt(C)) pinv(softmax(q~ k~^T / sqrt(C))) softmax(q~ k^T / sqrt(C)) v + conv(v))

Xiong et al., "Nystromformer: a Nystrom-based algorithm for approximating self-attention", 2021, section 3.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..autocast import without_autocast
from ..checks import check_odd, zero_padding
from ..ranges import Size, in_range
from ..registry import register
from .kernels import attend
from .masks import Rules
from .packed_heads import PackedHeads


@register("attention", "nystrom")
class NystromAttention(PackedHeads):
    """An approximation of softmax attention. Its time and memory grow with the number of tokens.

    A landmark is a mean over tokens on both sides of any token, so it cannot be causal. The real tokens of a row are
    split into `num_landmarks` segments of nearly equal length. With as many landmarks as tokens the attention is exact
    up to the pseudo-inverse. It has no dropout: the paper drops no probability.

    Args:
        num_landmarks: M, in landmarks; a row of fewer tokens has one for each.
        inverse_iterations: steps of the pseudo-inverse; once the error is small, each step raises it to the third
            power.
        conv_kernel_size: width, in tokens, of a depthwise convolution of the values that is added to the result of
            the heads, an odd number; None for none. The paper uses 33.

    Raises:
        ValueError: heads that do not divide, a size below one, or an even conv_kernel_size.

    >>> attention = NystromAttention(8, num_heads=2, num_landmarks=4)
    >>> attention(torch.ones(1, 32, 8)).shape
    torch.Size([1, 32, 8])
    """

    shown: ClassVar[tuple[str, ...]] = ("num_landmarks", "inverse_iterations")

    @in_range
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        num_landmarks: Size = 64,
        inverse_iterations: Size = 6,
        conv_kernel_size: Size | None = None,
    ) -> None:
        super().__init__(hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias)
        self.num_landmarks = num_landmarks
        self.inverse_iterations = inverse_iterations
        self.value_conv: nn.Conv2d | None = None
        if conv_kernel_size is not None:
            check_odd("conv_kernel_size", conv_kernel_size)
            self.value_conv = nn.Conv2d(
                num_heads,
                num_heads,
                (conv_kernel_size, 1),
                padding=(conv_kernel_size // 2, 0),
                groups=num_heads,
                bias=False,
            )

    def mix(self, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        member_BMT = _segments(q_BHTC, key_padding_mask, self.num_landmarks)
        group = self.num_heads // self.num_kv_heads
        q_means_BHMC = _means(q_BHTC, member_BMT)
        k_means_BHMC = _means(k_BGTC, member_BMT).repeat_interleave(group, dim=1)
        mask_B11M = None if key_padding_mask is None else member_BMT.any(-1)[:, None, None]
        rules = Rules(scale=1 / math.sqrt(self.head_dim))
        of_tokens, of_means = rules._replace(key_padding_mask=key_padding_mask), rules._replace(mask=mask_B11M)
        gathered_BHMC = attend(q_means_BHMC, k_BGTC, v_BGTC, of_tokens, p=0.0)
        passed_on_BHMC = _through_inverse(
            q_means_BHMC, k_means_BHMC, gathered_BHMC, mask_B11M, iterations=self.inverse_iterations
        )
        mixed_BHTC = attend(q_BHTC, k_means_BHMC, passed_on_BHMC, of_means, p=0.0)
        if self.value_conv is not None:
            mixed_BHTC = mixed_BHTC + self.value_conv(
                zero_padding(v_BGTC, key_padding_mask).repeat_interleave(group, dim=1)
            )
        return mixed_BHTC


def _segments(q_BHTC: Tensor, key_padding_mask: Tensor | None, most: int) -> Tensor:
    """Return which tokens each landmark is the mean of: bool [B, M, T], or [1, M, T] without padding.

    Segments are counted in real tokens, so that padding moves no border. In a row with fewer real tokens than landmarks
    some landmarks have none.
    """
    tokens = q_BHTC.shape[-2]
    landmarks = min(most, tokens)
    real_BT = q_BHTC.new_ones(1, tokens, dtype=torch.bool) if key_padding_mask is None else key_padding_mask
    count_B1 = real_BT.sum(-1, keepdim=True)
    segment_BT = (real_BT.cumsum(-1) - 1) * landmarks // count_B1.clamp(min=1)
    number_M1 = torch.arange(landmarks, device=q_BHTC.device)[:, None]
    return (segment_BT[:, None] == number_M1) & real_BT[:, None]


def _means(x_BHTC: Tensor, member_BMT: Tensor) -> Tensor:
    """Return the means over segments: [B, H, T, C], bool [B, M, T] -> [B, H, M, C]."""
    sums_BHMC = torch.einsum("bmt,bhtc->bhmc", member_BMT.to(x_BHTC.dtype), x_BHTC)
    return sums_BHMC / member_BMT.sum(-1).clamp(min=1)[:, None, :, None].to(sums_BHMC.dtype)


def _through_inverse(
    q_BHMC: Tensor, k_BHMC: Tensor, v_BHMC: Tensor, mask_B11M: Tensor | None, *, iterations: int
) -> Tensor:
    """Return pinv(softmax(q~ k~^T / sqrt(C))) v: [B, H, M, C] in v's dtype.

    In float32 at least, under autocast too: an inverse of weights has large values of both signs.
    """
    wide = torch.promote_types(q_BHMC.dtype, torch.float32)
    with without_autocast(q_BHMC):
        scores_BHMM = q_BHMC.to(wide) @ k_BHMC.to(wide).transpose(-2, -1) / math.sqrt(q_BHMC.shape[-1])
        if mask_B11M is not None:
            # A landmark without tokens attends only to itself, and no other attends to it. The inverse keeps that block
            # apart, so that the results of the others do not change.
            own_MM = torch.eye(q_BHMC.shape[2], dtype=torch.bool, device=q_BHMC.device)
            allowed_B1MM = torch.where(mask_B11M.transpose(-2, -1), mask_B11M, own_MM)
            scores_BHMM = scores_BHMM.masked_fill(~allowed_B1MM, -math.inf)
        return (_pseudo_inverse(scores_BHMM.softmax(-1), iterations) @ v_BHMC.to(wide)).to(v_BHMC.dtype)


def _pseudo_inverse(a_MM: Tensor, iterations: int) -> Tensor:
    """Return nearly the Moore-Penrose inverse of matrices of weights: [..., M, M] (section 3.2, equation 11)."""
    one_MM = torch.eye(a_MM.shape[-1], dtype=a_MM.dtype, device=a_MM.device)
    largest = a_MM.sum(-1).amax(-1) * a_MM.sum(-2).amax(-1)
    z_MM = a_MM.transpose(-2, -1) / largest[..., None, None]
    for _ in range(iterations):
        az_MM = a_MM @ z_MM
        z_MM = z_MM @ (13 * one_MM - az_MM @ (15 * one_MM - az_MM @ (7 * one_MM - az_MM))) / 4
    return z_MM
