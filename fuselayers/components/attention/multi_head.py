"""multi_head -- every token takes a weighted mean of the values of the tokens it may look at.

    x, y     [B, T, D]      B batch, T tokens, D model
    memory   [B, S, D]      the input of cross-attention, S tokens
    q        [B, H, T, C]   H query heads, C channels of a head
    k, v     [B, G, S, C]   G key-value heads; query head h uses key-value head h // (H / G); S = T, except with a
                            memory or a cache

    y = out(softmax(scale q k^T, over the allowed keys) v),   scale = 1 / sqrt(C)

See `ops.attention` for the cap, the sinks, the window and the bias of distances.

Vaswani et al. 2017, section 3.2; grouped queries: Ainslie et al. 2023; norms of queries and keys: Dehghani et al.,
"Scaling vision transformers to 22 billion parameters", 2023, section 2; window: Jiang et al., "Mistral 7B", 2023.
"""

import math
from typing import Any, ClassVar, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ...names import no_such
from ...ops.attention.by_torch import attention_by_torch
from ..checks import check_padding, check_sequence
from ..linear import Linear
from ..option import NotNegative, Positive, Probability, Size, checked, create, options
from ..registry import Choice, register
from .cache import KeyValueCache
from .flex import flex
from .inputs import Rotate
from .masks import check_block_mask
from .packed_heads import PackedHeads

Projections = Literal["packed", "separate", "shared"]
Kernel = Literal["auto", "sdpa", "flex", "plain"]
KERNELS: Final[tuple[Kernel, ...]] = get_args(Kernel)


@register("attention", "multi_head")
class MultiHeadAttention(PackedHeads):
    """Softmax attention. By default one packed projection makes queries, keys and values.

    It calls `ops.attention`, whose kernels save no probabilities for backward.

    Args:
        bias: whether the projection of queries, keys and values has a bias.
        out_bias: whether the output projection has a bias; None for the same as `bias`.
        dropout: probability of dropping an attention probability in training, 0 <= dropout <= 1.
        window: the range of attention in tokens: the token itself, the window - 1 tokens before it and, unless causal,
            as many after it; None for all tokens.
        qk_norm: name of the norm that each head's queries and keys pass before they are rotated, as in Qwen3; None for
            no norm.
        qk_norm_eps: the eps of that norm.
        soft_cap: the bound of the scores, which become soft_cap * tanh(score / soft_cap), as in Gemma 2; None for no
            bound.
        sinks: whether each head has a learned logit that joins the softmax without a value, as in GPT-OSS.
        scale: the factor of the scores; None for 1 / sqrt(head_dim).
        kernel: "auto" is `ops.attention`, "plain" its formula, "sdpa" torch's fused attention. "flex" is torch's flex
            attention for a `BlockMask` (on a GPU; on a CPU without gradients), else "auto".
        projections: "packed" has one layer `qkv` and is the fastest; "separate" has three layers `q`, `k` and `v`, for
            example to put an adapter on one of them; "shared" has one layer `q`, used for all three.
        causal: whether a token looks only at itself and the tokens before it.

    Raises:
        ValueError: heads that do not divide, a number out of its range, an unknown norm, kernel or projections, a
            kernel that does not support the options, or shared projections with fewer key-value heads.

    >>> attention = MultiHeadAttention(8, num_heads=4, num_kv_heads=2)
    >>> attention.qkv.out_features
    16
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal"})
    shown: ClassVar[tuple[str, ...]] = ("dropout", "causal")

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_heads: Size,
        num_kv_heads: Size | None = None,
        head_dim: Size | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: Probability = 0.0,
        window: Size | None = None,
        qk_norm: str | None = None,
        qk_norm_eps: NotNegative = 1e-6,
        soft_cap: Positive | None = None,
        sinks: bool = False,
        scale: Positive | None = None,
        kernel: Kernel = "auto",
        projections: Projections = "packed",
        causal: bool = False,
    ) -> None:
        if kernel not in KERNELS:
            raise ValueError(no_such("kernel", kernel, KERNELS))
        if kernel in ("sdpa", "flex") and dropout > 0:
            raise ValueError(f"the kernel {kernel!r} cannot drop probabilities; use 'auto' or 'plain', or dropout=0")
        if kernel == "sdpa" and soft_cap is not None:
            raise ValueError("the kernel 'sdpa' cannot cap scores; use 'auto', or leave soft_cap out")
        if projections not in get_args(Projections):
            raise ValueError(no_such("projections", projections, get_args(Projections)))
        if projections == "shared" and num_kv_heads not in (None, num_heads):
            raise ValueError(
                f"shared projections need as many key-value heads as query heads, got {num_kv_heads} and {num_heads}"
            )
        super().__init__(
            hidden_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, bias=bias, out_bias=out_bias
        )
        self.projections: Projections = projections
        if projections != "packed":
            del self.qkv
            self.q = Linear(hidden_dim, num_heads * self.head_dim, bias=bias)
        if projections == "separate":
            self.k, self.v = (Linear(hidden_dim, self.num_kv_heads * self.head_dim, bias=bias) for _ in range(2))
        self.dropout = dropout
        self.window = window
        self.soft_cap = soft_cap
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.kernel: Kernel = kernel
        self.causal = causal
        self.q_norm, self.k_norm = (_head_norm(qk_norm, self.head_dim, qk_norm_eps) for _ in range(2))
        self.sinks = nn.Parameter(torch.empty(num_heads)) if sinks else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the sinks to zero. The projections and norms reset themselves."""
        if self.sinks is not None:
            self.sinks.zero_()

    def forward(
        self,
        x_BTD: Tensor,
        *,
        rotate: Rotate | None = None,
        distance_bias: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
        memory: Tensor | None = None,
        values: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of every token: [B, T, D] -> [B, T, D].

        A token without any allowed key gets zeros before the output projection.

        Args:
            x_BTD: [B, T, D].
            rotate: adds positions to queries and keys, as `Position.rotate` does; None changes nothing.
            distance_bias: [H, T + S - 1], finite, added to the scores: entry s - t + T - 1 for query t and key s, as
                `Position.distance_bias` makes it; None adds nothing.
            key_padding_mask: bool [B, S], True for a real token, False for padding, which is ignored.
            mask: bool, broadcastable to [B, H, T, S], True where a token may look; or a `BlockMask` of torch's flex
                attention for the kernel "flex". None hides nothing.
            documents: integers [B, S], the number of each token's document, if a row holds several: a token looks only
                at its own document. None if each row is one document.
            cache: the keys and values of the tokens before x; those of x are added. With a memory it holds the memory's
                keys and values, which only the first call computes.
            memory: [B, S, D], the source of keys and values in cross-attention; None for x itself.
            values: [B, S, D], the source of the values if it is not the memory; None for the memory.

        Raises:
            ValueError: an input has another shape or dtype, or inputs and options contradict each other.
            RuntimeError: a cache is given and a gradient is needed.
        """
        check_sequence(x_BTD, self.hidden_dim)
        batch, tokens, _ = x_BTD.shape
        if memory is not None:
            self.check_look_at(memory, x_BTD, rotate, key_padding_mask)
            if documents is not None:
                raise ValueError("documents are for queries and keys of the same tokens; leave them out with a memory")
            first, keys = 0, memory.shape[1]
        else:
            if cache is not None and not self.causal:
                raise ValueError("a cache needs causal attention; build it with causal=True, or leave the cache out")
            first = 0 if cache is None else cache.length
            keys = first + tokens
            if key_padding_mask is not None:
                check_padding(key_padding_mask, x_BTD, before=first)
        if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] > 1:
            mask = self.layout.own(mask, 1)
        check_block_mask(mask, documents, tokens, keys, kernel=self.kernel)
        if values is not None and (memory is None or values.shape != memory.shape):
            wanted = "given with a memory" if memory is None else f"{list(memory.shape)} as the memory is"
            raise ValueError(f"values must be {wanted}, got {list(values.shape)}")
        if memory is None:
            q_BHTC, k_BGSC, v_BGSC = self._look_around(x_BTD, rotate, cache)
        else:
            q_BHTC, k_BGSC, v_BGSC = self._look_at(memory, values, x_BTD, cache)
        rules: dict[str, Any] = {
            "scale": self.scale,
            "causal": self.causal,
            "window": self.window,
            "first": first,
            "soft_cap": self.soft_cap,
            "sinks": self.sinks,
            "distance_bias": distance_bias,
            "key_padding_mask": key_padding_mask,
        }
        if isinstance(mask, BlockMask):
            if batch:
                return self.join(flex(q_BHTC, k_BGSC, v_BGSC, mask, **rules))
            mask = None  # the formula that flex runs on a CPU fails for most empty batches
        rules |= {"mask": mask, "documents": documents}
        if self.kernel == "sdpa":
            del rules["soft_cap"]
            rules["bias"] = rules.pop("distance_bias")
            return self.join(attention_by_torch(q_BHTC, k_BGSC, v_BGSC, **rules))
        backend = "eager" if self.kernel == "plain" else "auto"
        return self.join(self.attend(q_BHTC, k_BGSC, v_BGSC, p=self.dropout, backend=backend, **rules))

    def check_memory(self) -> None:
        """Raise ValueError if the options exclude a memory."""
        super().check_memory()
        if self.window is not None:
            raise ValueError("attention with a window takes no memory; build it without window=")

    def parts(self, x_BTD: Tensor, names: str) -> list[Tensor]:
        """As `PackedHeads.parts`, for any `projections`."""
        if self.projections == "packed":
            return super().parts(x_BTD, names)
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        layers = {name: self.q if self.projections == "shared" else getattr(self, name) for name in names}
        return [torch.unflatten(layers[name](x_BTD), -1, (heads[name], self.head_dim)) for name in names]

    def _look_around(
        self, x_BTD: Tensor, rotate: Rotate | None, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of x, and the keys and values up to its last token: [B, H, T, C], [B, G, S, C] twice."""
        q_BTHC, k_BTGC, v_BTGC = self.parts(x_BTD, "qkv")
        q_BHTC = self._normed(self.q_norm, q_BTHC).transpose(1, 2)
        k_BGTC, v_BGTC = self._normed(self.k_norm, k_BTGC).transpose(1, 2), v_BTGC.transpose(1, 2)
        if rotate is not None:
            q_BHTC, k_BGTC = rotate(q_BHTC, k_BGTC)
        return q_BHTC, *((k_BGTC, v_BGTC) if cache is None else cache.append(k_BGTC, v_BGTC))

    def _look_at(
        self, memory_BSD: Tensor, values_BSD: Tensor | None, x_BTD: Tensor, cache: KeyValueCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries of x and the keys and values of the memory: [B, H, T, C], [B, G, S, C] twice."""
        q_BHTC = self._normed(self.q_norm, *self.parts(x_BTD, "q")).transpose(1, 2)
        if cache is not None and cache.length:
            batch, keys, _ = memory_BSD.shape
            cache.check_keys((batch, self.num_kv_heads, keys, self.head_dim), q_BHTC.dtype)
            return q_BHTC, *cache.stored()
        if values_BSD is None:
            k_BSGC, v_BSGC = self.parts(memory_BSD, "kv")
        else:
            (k_BSGC,), (v_BSGC,) = self.parts(memory_BSD, "k"), self.parts(values_BSD, "v")
        k_BGSC, v_BGSC = self._normed(self.k_norm, k_BSGC).transpose(1, 2), v_BSGC.transpose(1, 2)
        return q_BHTC, *((k_BGSC, v_BGSC) if cache is None else cache.append(k_BGSC, v_BGSC))

    @staticmethod
    def _normed(norm: nn.Module | None, heads: Tensor) -> Tensor:
        normed: Tensor = heads if norm is None else norm(heads)
        return normed

    def extra_repr(self) -> str:
        said = [name for name in ("window", "soft_cap") if getattr(self, name) is not None]
        said += ["kernel"] if self.kernel != "auto" else []
        said += ["projections"] if self.projections != "packed" else []
        return ", ".join([super().extra_repr(), *(f"{name}={getattr(self, name)!r}" for name in said)])


def _head_norm(name: str | None, head_dim: int, eps: float) -> nn.Module | None:
    if name is None:
        return None
    norm_options = {"eps": eps} if any(option.name == "eps" for option in options("norm", name)) else {}
    norm: nn.Module = create("norm", Choice(name, norm_options), head_dim)
    return norm
