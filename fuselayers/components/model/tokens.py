"""Checks, embeddings, logits and losses of tokens.

tokens, targets   [B, T]      B batch, T tokens
logits            [B, T, V]   V vocabulary
"""

import functools
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch.dispatch import is_intercepted
from ...ops import linear, linear_cross_entropy
from ..option import create
from ..plain import is_parameter, is_plain_linear
from ..registry import Choice, as_choice
from .model import Model

# The target of a position that does not count in the loss, as in torch.
IGNORED = -100
Loss = Literal["auto", "fused", "plain"]
# Fused against plain in float32, forward and backward, two cores of a Xeon: 0.74 of the time for [2048, 256] x
# [256, 4096], 0.83 to 1.08 for larger vocabularies, 1.29 for [2048, 128] x [128, 256].
_FUSED_FROM: Final = 4096


def check_tokens(tokens: Tensor, name: str = "tokens", *, table: nn.Module | None = None) -> None:
    """Raise unless `tokens` is int64 or int32 [B, T], T at least one, and its values are rows of a given table."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a tensor [B, T], got {type(tokens).__name__}; use torch.tensor({name})")
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, got {tokens.dtype}; convert with {name}.long()")
    if tokens.dim() != 2:
        hint = f"; add the batch dimension with {name}[None]" if tokens.dim() == 1 else ""
        raise ValueError(f"{name} must be [B, T], got {list(tokens.shape)}{hint}")
    if tokens.shape[1] == 0:
        raise ValueError(f"{name} must hold at least one token per row, got {list(tokens.shape)}")
    if table is not None:
        check_range(tokens, table, name)


def check_range(values: Tensor, table: nn.Module, name: str, *, may_ignore: bool = False) -> None:
    """Raise ValueError for a value outside 0 .. N - 1, for N rows of a table or N outputs of an output layer.

    Only on a CPU, because reading values from a GPU would wait for it. `may_ignore` allows `IGNORED` too.
    """
    size = getattr(table, "num_embeddings", None) or getattr(table, "out_features", None)
    if size is None or type(values) is not Tensor or values.device.type != "cpu" or is_intercepted():
        return
    counted = values.masked_fill(values == IGNORED, 0) if may_ignore else values
    if counted.numel() and not all(0 <= int(end) < size for end in counted.aminmax()):
        allowed = f"0..{size - 1}" + f" or {IGNORED}" * may_ignore
        raise ValueError(f"{name} must be in {allowed}, got {int(values.min())}..{int(values.max())}")


def check_like_tokens(
    name: str,
    other: Tensor | None,
    tokens: Tensor,
    *,
    dtype: torch.dtype,
    like: str = "tokens",
    table: nn.Module | None = None,
) -> None:
    """Raise unless `other` is None or has the shape of `tokens` and the given dtype. `like` names `tokens` in errors.

    With a table, or an output layer, its values must be rows of it, or `IGNORED`.
    """
    if other is None:
        return
    if not isinstance(other, Tensor):
        raise TypeError(f"{name} must be a tensor like {like}, got {type(other).__name__}; use torch.tensor({name})")
    if other.shape != tokens.shape or other.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} {list(tokens.shape)} like {like}, got {other.dtype} {list(other.shape)}"
        )
    if table is not None:
        check_range(other, table, name, may_ignore=True)


def build_token_embedding(embedding: Choice | str, *, vocab_size: int, hidden_dim: int) -> nn.Embedding:
    """Return the chosen embedding of tokens, an `nn.Embedding`, so that a tied head can use its table.

    Raises:
        ValueError: an unknown name or option, or an embedding of something other than tokens.
        TypeError: the class is not a subclass of `nn.Embedding`.
    """
    built = create("embedding", embedding, vocab_size=vocab_size, hidden_dim=hidden_dim)
    if not isinstance(built, nn.Embedding):
        raise TypeError(
            f"embedding {as_choice(embedding).name!r} must be a subclass of nn.Embedding, a table of tokens"
        )
    return built


class ModelWithHead(Model):
    """The base of the models whose output layer turns vectors into logits.

    Subclasses set these attributes.

    Attributes:
        token: the table [V, D] of a tied head.
        head: the output layer; None for a tied head.
        bias: [V], added to the logits; None (the default) adds nothing.
        logit_scale: factor of the logits.
        logit_soft_cap: the bound of the logits, which become cap * tanh(logits / cap); None for no bound.
        loss: see `Model`.
    """

    token: nn.Embedding
    head: nn.Linear | None
    bias: Tensor | None
    logit_scale: float
    logit_soft_cap: float | None
    loss: Loss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not hasattr(type(self), "bias"):  # a subclass may define it, or set a parameter later
            self.register_parameter("bias", None)

    def to_logits(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., V]. With `parallelize` each process computes all logits."""
        return self.layout.once(self._local_logits(x))

    def _local_logits(self, x: Tensor) -> Tensor:
        # Scaling D numbers is cheaper than V.
        x = x if self.logit_scale == 1 else x * self.logit_scale
        if self.head is None:
            logits = linear(x, self.token.weight, self.bias)
        else:
            # The layer is called, so that adapters, hooks, quantization and FSDP work.
            logits = self.head(x)
            if self.bias is not None:
                # Autocast rounds the result of a layer, but not that of a sum.
                logits = logits + self.bias.to(logits.dtype)
        cap = self.logit_soft_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    def to_loss(self, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Return the mean cross entropy of the logits of x in nats, and in training the auxiliary losses of the blocks.

        Args:
            x_BTD: [B, T, D].
            targets_BT: [B, T], with -100 for positions that do not count.

        Returns:
            A float32 scalar; nan if no target counts.

        Raises:
            ValueError: the loss is "fused" and the head does not support it.
        """
        weight_VD = self._fused_weight()
        if self.loss == "fused" and weight_VD is None:
            head = self.token.weight if self.head is None else self.head
            has_bias = getattr(head, "bias", None) is not None
            raise ValueError(
                "the loss 'fused' needs an output layer that is one matrix, without a bias, hooks or adapters, got "
                f"{type(head).__name__}{' with a bias' if has_bias else ''}; use loss='auto'"
            )
        counted = (targets_BT != IGNORED).sum() if self.layout.divided else None
        if self.layout.divided:  # its own tokens, as one row
            x_BTD, targets_BT = (self.layout.own(whole.flatten(0, 1), 0)[None] for whole in (x_BTD, targets_BT))
        if weight_VD is not None:
            inputs = x_BTD if self.logit_scale == 1 else x_BTD * self.logit_scale, weight_VD, targets_BT
            loss_of = functools.partial(linear_cross_entropy, *inputs, bias=self.bias, dtype=torch.float32)
        else:
            logits_BTV = self._local_logits(x_BTD)
            loss_of = functools.partial(F.cross_entropy, logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
        if counted is None:
            return self.with_auxiliary_loss(loss_of(ignore_index=IGNORED))
        loss = self.layout.total(loss_of(ignore_index=IGNORED, reduction="sum") / counted)
        return self.with_auxiliary_loss(loss)

    def _fused_weight(self) -> Tensor | None:
        """Return the weight [V, D] for the fused loss, or None if the logits have to be computed."""
        # See Note: [guards of a split linear].
        if self.head is not None and (not is_plain_linear(self.head) or self.head.bias is not None):
            return None
        weight_VD = self.token.weight if self.head is None else self.head.weight
        plain = self.loss == "plain" or (self.loss == "auto" and weight_VD.shape[0] < _FUSED_FROM)
        # A subclass, such as a shard of the table, computes the logits in its own way.
        return None if plain or not is_parameter(weight_VD) or self.logit_soft_cap is not None else weight_VD
