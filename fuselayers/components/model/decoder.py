"""decoder -- a language model: each token is predicted from the tokens before it.

    tokens, targets   [B, T]      B batch, T tokens
    x                 [B, T, D]   D model
    logits            [B, T, V]   V vocabulary

It is GPT-2 with learned positions, layer norms and an mlp; Llama with rotary positions, RMS norms and a gated_mlp;
BLOOM with ALiBi and a norm of the embeddings; Phi with a bias of the logits.
"""

import functools
from collections.abc import Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ...ops import dropout as dropout_op
from ..attention import KeyValueCache
from ..init import Scheme, check_scheme, initialise, logit_factor
from ..linear import Linear
from ..norm import Norm
from ..option import Count, NotNegative, Positive, Probability, Share, Size, checked, create
from ..position import Position
from ..registry import Choice, register
from .layers import LayerChange
from .sampling import continued, generating, next_token
from .stack import Stack
from .tokens import (
    Loss,
    ModelWithHead,
    build_token_embedding,
    check_like_tokens,
    check_tokens,
)


@register("model", "decoder")
class Decoder(ModelWithHead, Stack):
    """A decoder-only transformer.

    The arguments and errors of `Model`, and:

    Args:
        embedding_norm: whether a norm of the chosen kind follows the embeddings and positions, as in BLOOM.
        embedding_dropout: probability of dropping a value of the embeddings; None for `dropout`.
        head_bias: whether the logits have a bias, also with a tied head, as in Phi.
        logit_soft_cap: the bound of the logits, cap * tanh(logits / cap), 30 in Gemma 2; None for no bound.

    >>> heads = Choice("multi_head", {"num_heads": 2})
    >>> model = Decoder(vocab_size=10, hidden_dim=8, num_layers=1, context_length=4, attention=heads)
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 10])
    """

    @checked
    def __init__(
        self,
        *,
        vocab_size: Size,
        hidden_dim: Size,
        num_layers: Size,
        context_length: Size,
        attention: Choice | str,
        feedforward: Choice | str = "mlp",
        norm: Choice | str = "layer_norm",
        residual: Choice | str = "pre",
        position: Choice | str = "learned",
        embedding: Choice | str = "token",
        block: Choice | str = "transformer",
        layers: Sequence[LayerChange] = (),
        dropout: Probability = 0.0,
        embedding_norm: bool = False,
        embedding_dropout: Probability | None = None,
        tie_embeddings: bool = True,
        head_bias: bool = False,
        logit_scale: Positive = 1.0,
        logit_soft_cap: Positive | None = None,
        loss: Loss = "auto",
        init: Scheme = "gpt2",
        init_std: NotNegative = 0.02,
        base_width: Size | None = None,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        check_scheme(init, base_width=base_width)
        if loss == "fused" and logit_soft_cap is not None:
            raise ValueError("the loss 'fused' cannot cap logits; use 'auto', or leave logit_soft_cap out")
        super().__init__(
            hidden_dim,
            num_layers=num_layers,
            context_length=context_length,
            attention=attention,
            feedforward=feedforward,
            norm=norm,
            residual=residual,
            position=position,
            block=block,
            layers=layers,
            dropout=dropout,
            causal=True,
            backend=backend,
            partition=partition,
        )
        self.logit_soft_cap = logit_soft_cap
        self.loss: Loss = loss
        self.token = build_token_embedding(embedding, vocab_size=vocab_size, hidden_dim=hidden_dim)
        self.embedding_norm: Norm | None = create("norm", norm, hidden_dim) if embedding_norm else None
        self.embedding_dropout = dropout if embedding_dropout is None else embedding_dropout
        # Note: [a tied head is no module] Two modules that share a parameter lose the tie in `to_empty`, and a
        # state_dict would hold the table twice. So a tied head is the table itself.
        self.head = None if tie_embeddings else Linear(hidden_dim, vocab_size, bias=False)
        # Not a bias of the output layer: a tied head has no layer, and the fused loss does not support one with a bias.
        self.bias = nn.Parameter(torch.zeros(vocab_size)) if head_bias else None
        self.logit_scale = logit_scale * logit_factor(hidden_dim, base_width)
        initialise(self, init, num_layers=num_layers, std=init_std, base_width=base_width)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, or the loss if there are targets.

        Args:
            tokens_BT: int64 or int32 [B, T], values in 0 .. V - 1.
            targets_BT: int64 [B, T], the token that follows each token, or -100 for positions that do not count, such
                as padding and the end of a document; None for logits.
            key_padding_mask: bool [B, T], True for a real token; None if all are real. Padding on the left uses no
                positions.
            mask: bool, broadcastable to [B, H, T, T], True where a token may look, or a `BlockMask`, as for the
                attention; None hides nothing. Later tokens are always hidden.
            document_ids: integers [B, T], the number of each token's document if a row holds several; a token looks
                only at its own document. Positions are counted along the row. None if each row is one document.

        Returns:
            The logits [B, T, V]; with targets the mean cross entropy in nats, in training plus the auxiliary losses of
            the blocks: a float32 scalar.

        Raises:
            TypeError: the tokens are not a tensor of integers.
            ValueError: tokens, targets or a mask of another shape or dtype, a token outside the vocabulary, a sequence
                that is too long for its positions, a mask or documents that the attention cannot use, or documents in
                a model whose feedforward mixes tokens.
        """
        x_BTD = self.features(tokens_BT, key_padding_mask=key_padding_mask, mask=mask, document_ids=document_ids)
        return self.to_logits(x_BTD) if targets_BT is None else self.to_loss(x_BTD, targets_BT)

    def check_arguments(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        document_ids: Tensor | None = None,
    ) -> None:
        """Raise the errors of `forward`. A call of the model runs this first."""
        check_tokens(tokens_BT, table=self.token)
        check_like_tokens("targets", targets_BT, tokens_BT, dtype=torch.int64, table=self.head or self.token)
        check_like_tokens("key_padding_mask", key_padding_mask, tokens_BT, dtype=torch.bool)
        self.check_documents(tokens_BT, mask, document_ids)
        self.position.check_length(tokens_BT.shape[1])

    def features(
        self,
        tokens_BT: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        document_ids: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """Return the input of the output layer: [B, T] -> [B, T, D].

        Args:
            tokens_BT: the tokens; with caches only those that are not in the caches yet.
            key_padding_mask: as for `forward`; with caches it covers all tokens so far.
            mask, document_ids: as for `forward`.
            caches: one per block, to which these tokens are added; None for no caches.
        """
        first = caches[0].length if caches else 0
        x_BTD = self._placed(self.token(tokens_BT), first, key_padding_mask)
        x_BTD = x_BTD if self.embedding_norm is None else self.embedding_norm(x_BTD)
        x_BTD = dropout_op(x_BTD, self.embedding_dropout, training=self.training)
        return self.run_blocks(
            x_BTD, caches=caches, key_padding_mask=key_padding_mask, mask=mask, documents=document_ids
        )

    def _placed(self, x_BTD: Tensor, first: int, key_padding_mask: Tensor | None) -> Tensor:
        """Return the embeddings with their positions; padding on the left has none: [B, T, D] -> [B, T, D]."""
        if key_padding_mask is None or type(self.position).forward is Position.forward:
            placed_BTD: Tensor = self.position(x_BTD, first=first)
            return placed_BTD
        end = first + x_BTD.shape[1]
        padding_B = (key_padding_mask.cumsum(1) == 0).sum(1)
        # Each row is shifted so that its padding comes last, gets its positions, and is shifted back.
        place_BT = (torch.arange(first, end, device=x_BTD.device) - padding_B[:, None]) % end
        place_BTD = place_BT[..., None].expand_as(x_BTD)
        moved_BSD = x_BTD.new_zeros(len(x_BTD), end, x_BTD.shape[2]).scatter(1, place_BTD, x_BTD)
        placed_BSD: Tensor = self.position(moved_BSD)
        return placed_BSD.gather(1, place_BTD)

    @checked
    @torch.no_grad()
    def generate(
        self,
        tokens_BT: Tensor,
        num_tokens: Count,
        *,
        key_padding_mask: Tensor | None = None,
        temperature: NotNegative = 1.0,
        top_k: Size | None = None,
        top_p: Share | None = None,
        stop_tokens: Collection[int] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue each row of tokens, token by token, from the last `context_length` tokens.

        It runs in eval mode and restores the mode of every module. Fused modules run eagerly, since they would be
        recompiled for each token. Keys and values are cached if all blocks support it, until the context is full. From
        then on each new token shifts all others, and everything is recomputed.

        Args:
            tokens_BT: int64 or int32 [B, T], the prompts, T at least one.
            num_tokens: how many tokens to add.
            key_padding_mask: bool [B, T], True for a real token of a prompt that is padded on the left, like the
                attention_mask of other libraries; None if all are real.
            temperature: divides the logits; 0 always takes the likeliest token.
            top_k: how many of the likeliest tokens may be drawn; None for all.
            top_p: of these, only the fewest and likeliest with this total probability; None for all.
            stop_tokens: a row ends with the first of these, and repeats it while other rows continue.
            generator: the random generator, on the model's device; None for torch's default generator.

        Returns:
            [B, T + n] in the dtype of tokens, n = num_tokens, or fewer if all rows have ended: the prompts and their
            continuations.

        Raises:
            TypeError: the tokens are not a tensor of integers.
            ValueError: the tokens have another shape, the mask does not fit or hides more than padding on the left, or
                a number is out of its range.
        """
        check_tokens(tokens_BT, table=self.token)
        _check_left_padding(key_padding_mask, tokens_BT)

        def logits_of(newest_BT: Tensor, caches: Sequence[KeyValueCache] | None, length: int) -> Tensor:
            mask = key_padding_mask
            if mask is not None:
                keys = length if caches else newest_BT.shape[1]
                mask = F.pad(mask, (0, length - mask.shape[1]), value=True)[:, length - keys :]
            return self.to_logits(self.features(newest_BT, key_padding_mask=mask, caches=caches)[:, -1])

        draw = functools.partial(next_token, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        with generating(self):
            return continued(
                tokens_BT,
                num_tokens,
                logits_of,
                draw,
                context_length=self.context_length,
                new_caches=self.new_caches,
                stop_tokens=stop_tokens,
            )

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, embedding_dropout={self.embedding_dropout}, tie_embeddings={self.head is None}, "
            f"head_bias={self.bias is not None}, logit_scale={self.logit_scale}, logit_soft_cap={self.logit_soft_cap}"
        )


def _check_left_padding(mask: Tensor | None, tokens_BT: Tensor) -> None:
    check_like_tokens("key_padding_mask", mask, tokens_BT, dtype=torch.bool)
    if mask is not None and not (mask[:, -1].all() & (mask[:, 1:] >= mask[:, :-1]).all()):
        raise ValueError(
            "key_padding_mask must be False only before the first real token of a row: prompts are padded on the left"
        )
