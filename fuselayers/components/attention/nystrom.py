"""nystrom -- softmax attention by the Nystrom method: through M landmarks, which are means of queries and of keys.

    x, y      [B, T, D]      B batch, T tokens, D model
    q         [B, H, T, C]   H query heads, C channels of a head
    k, v      [B, G, S, C]   G key-value heads; query head h uses key-value head h // (H / G); S = T without a memory
    q~        [B, H, M, C]   landmarks of the queries: means over M segments of tokens
    k~        [B, H, N, C]   landmarks of the keys; N = M without a memory

    y = out(softmax(q k~^T / sqrt(C)) pinv(softmax(q~ k~^T / sqrt(C))) softmax(q~ k^T / sqrt(C)) v + conv(v))

Xiong et al., "Nystromformer: a Nystrom-based algorithm for approximating self-attention", 2021, section 3.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...ops import attention, softmax
from ...ops import dropout as dropout_op
from ...ops.implementations import without_autocast
from ..checks import check_odd, zero_padding
from ..option import Probability, Size, checked
from ..registry import register
from .packed_heads import CrossHeads


@register("attention", "nystrom")
class NystromAttention(CrossHeads):
    """An approximation of softmax attention. Its time and memory grow linearly with the number of tokens.

    Landmarks average over later tokens too, so this attention cannot be causal, nor look at a memory in a causal model.
    The real tokens of a row are split into `num_landmarks` segments of nearly equal length. With as many landmarks as
    tokens the attention is exact up to the pseudo-inverse.

    Args:
        num_landmarks: M; a row with fewer tokens has one landmark for each.
        inverse_iterations: iterations of the pseudo-inverse; once the error is small, each iteration cubes it.
        conv_kernel_size: width in tokens, an odd number, of a depthwise convolution of the values that is added to the
            heads' results; None for no convolution, which a memory requires. The paper uses 33.
        dropout: probability of dropping a value of a head's result in training, 0 <= dropout <= 1.

    Raises:
        ValueError: heads that do not divide, a size below one, a dropout outside [0, 1], or an even conv_kernel_size.

    >>> attention = NystromAttention(8, num_heads=2, num_landmarks=4)
    >>> attention(torch.ones(1, 32, 8)).shape
    torch.Size([1, 32, 8])
    """

    shown: ClassVar[tuple[str, ...]] = ("num_landmarks", "inverse_iterations", "dropout")
    # The result of a query depends on the other queries.
    mixes_queries: ClassVar[bool] = True

    @checked
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
        dropout: Probability = 0.0,
    ) -> None:
        super().__init__(hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias)
        self.num_landmarks = num_landmarks
        self.inverse_iterations = inverse_iterations
        self.dropout = dropout
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

    def check_memory(self) -> None:
        """Raise ValueError if the options exclude a memory."""
        if self.value_conv is not None:
            raise ValueError("attention with a convolution of the values takes no memory; leave conv_kernel_size out")

    def mix(self, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        member_BMT = _segments(q_BHTC, key_padding_mask, self.num_landmarks)
        return self._through_landmarks(q_BHTC, k_BGTC, v_BGTC, member_BMT, member_BMT, key_padding_mask)

    def mix_memory(self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        of_q_BMT = _segments(q_BHTC, None, self.num_landmarks)
        of_k_BNS = _segments(k_BGSC, key_padding_mask, self.num_landmarks)
        return self._through_landmarks(q_BHTC, k_BGSC, v_BGSC, of_q_BMT, of_k_BNS, key_padding_mask)

    def _through_landmarks(
        self,
        q_BHTC: Tensor,
        k_BGSC: Tensor,
        v_BGSC: Tensor,
        of_q_BMT: Tensor,
        of_k_BNS: Tensor,
        key_padding_mask: Tensor | None,
    ) -> Tensor:
        group = self.num_heads // self.num_kv_heads
        q_means_BHMC = _means(q_BHTC, of_q_BMT)
        k_means_BHNC = _means(k_BGSC, of_k_BNS).repeat_interleave(group, dim=1)
        mask_B11N = used_B1MN = None
        if key_padding_mask is not None:
            # Some landmarks may have no tokens.
            mask_B11N = of_k_BNS.any(-1)[:, None, None]
            used_B1MN = mask_B11N & of_q_BMT.any(-1)[:, None, :, None]
        gathered_BHMC = attention(q_means_BHMC, k_BGSC, v_BGSC, key_padding_mask=key_padding_mask)
        passed_on_BHNC = _through_inverse(
            q_means_BHMC, k_means_BHNC, gathered_BHMC, used_B1MN, iterations=self.inverse_iterations
        )
        mixed_BHTC = attention(q_BHTC, k_means_BHNC, passed_on_BHNC, mask=mask_B11N)
        if self.value_conv is not None:
            mixed_BHTC = mixed_BHTC + self.value_conv(
                zero_padding(v_BGSC, key_padding_mask).repeat_interleave(group, dim=1)
            )
        shard = self.layout.shard(mixed_BHTC, 1)
        return dropout_op(mixed_BHTC, self.dropout, training=self.training, shard=shard)


def _segments(q_BHTC: Tensor, key_padding_mask: Tensor | None, most: int) -> Tensor:
    """Return the tokens that each landmark averages: bool [B, M, T], or [1, M, T] without padding.

    Segments are counted in real tokens, so that padding moves no border. If a row has fewer real tokens than landmarks,
    some landmarks have no tokens.
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
    q_BHMC: Tensor, k_BHNC: Tensor, v_BHMC: Tensor, used_B1MN: Tensor | None, *, iterations: int
) -> Tensor:
    """Return pinv(softmax(q~ k~^T / sqrt(C))) v: [B, H, N, C] in v's dtype.

    It runs in float32 or wider, also under autocast, because the inverse has large values of both signs.
    """
    wide = torch.promote_types(q_BHMC.dtype, torch.float32)
    with without_autocast(q_BHMC):
        scores_BHMN = q_BHMC.to(wide) @ k_BHNC.to(wide).transpose(-2, -1) / math.sqrt(q_BHMC.shape[-1])
        # The rows and columns of landmarks without tokens are zeros, and so are those of the inverse.
        weights_BHMN = softmax(scores_BHMN, used_B1MN)
        return (_pseudo_inverse(weights_BHMN, iterations) @ v_BHMC.to(wide)).to(v_BHMC.dtype)


def _pseudo_inverse(a_MN: Tensor, iterations: int) -> Tensor:
    """Return approximate Moore-Penrose inverses of matrices of weights: [..., M, N] -> [..., N, M].

    Section 3.2, equation 11.
    """
    one_MM = torch.eye(a_MN.shape[-2], dtype=a_MN.dtype, device=a_MN.device)
    largest = a_MN.sum(-1).amax(-1) * a_MN.sum(-2).amax(-1)
    # A row that is all padding has the inverse 0.
    z_NM = a_MN.transpose(-2, -1) / largest.masked_fill(largest == 0, 1.0)[..., None, None]
    for _ in range(iterations):
        az_MM = a_MN @ z_NM
        z_NM = z_NM @ (13 * one_MM - az_MM @ (15 * one_MM - az_MM @ (7 * one_MM - az_MM))) / 4
    return z_NM
