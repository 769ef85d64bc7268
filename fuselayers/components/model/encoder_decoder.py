"""encoder_decoder -- one sequence in, another out: each token is predicted from the source and the tokens before it.

    source            [B, S]      B batch, S tokens of the source
    inputs, targets   [B, T]      T tokens of the target; the inputs are the targets shifted right by one
    memory            [B, S, D]   D model; the output of the encoder, the input of cross-attention
    logits            [B, T, V]   V vocabulary

Vaswani et al. 2017; BART (Lewis et al. 2019) with learned positions, T5 (Raffel et al. 2019) with relative ones.
"""

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from ...ops import dropout as dropout_op
from ..attention import KeyValueCache
from ..init import Scheme, check_scheme, initialise, logit_factor
from ..linear import Linear
from ..option import Component, Count, NotNegative, Positive, Probability, Share, Size, checked
from ..registry import Choice, as_choice, register
from .layers import LayerChange
from .sampling import continued, generating, next_token
from .stack import Stack
from .tokens import (
    IGNORED,
    Loss,
    ModelWithHead,
    build_token_embedding,
    check_like_tokens,
    check_tokens,
)


@register("model", "encoder_decoder")
class EncoderDecoder(ModelWithHead):
    """Two stacks with one table of token embeddings; the decoder's blocks attend to the output of the encoder.

    The residual style deepnorm has the default alpha for encoder-decoders: 0.81 (N^4 M)^(1/16) in the encoder of N
    blocks, (3 M)^(1/4) in the decoder of M (Wang et al. 2022, figure 2).

    The arguments and errors of `Model`, and:

    Args:
        vocab_size: V, number of different tokens in source and target together.
        num_layers: number of blocks of the encoder.
        num_decoder_layers: number of blocks of the decoder; None for as many as in the encoder.
        context_length: longest source and longest target in tokens that it is trained on.
        cross_attention: the attention to the memory; None for the choice of `attention`, which must then have no
            window.
        position: the kind of position and its options; each stack has its own positions, and cross-attention has none.
        layers: other components for some of the encoder's blocks, see `LayerChange`.
        decoder_layers: other components for some of the decoder's blocks.
        dropout: probability of dropping a value of the embeddings, of each sublayer's output, and of the output of the
            norm at the end of a stack, as in T5; 0 <= dropout <= 1.
        logit_scale: factor of the logits; hidden_dim ** -0.5 in the first T5, whose head is tied.
        start_token: the first input of the decoder.

    Raises:
        ValueError: an attention cannot look at a memory, or start_token is outside the vocabulary.

    >>> heads = Choice("multi_head", {"num_heads": 2})
    >>> model = EncoderDecoder(vocab_size=10, hidden_dim=8, num_layers=1, context_length=4, attention=heads)
    >>> model(torch.tensor([[1, 2, 3]]), inputs_BT=torch.tensor([[0, 4]])).shape
    torch.Size([1, 2, 10])
    """

    logit_soft_cap = None

    @checked
    def __init__(
        self,
        *,
        vocab_size: Size,
        hidden_dim: Size,
        num_layers: Size,
        num_decoder_layers: Size | None = None,
        context_length: Size,
        attention: Choice | str,
        cross_attention: Annotated[Choice | str | None, Component("attention")] = None,
        feedforward: Choice | str = "mlp",
        norm: Choice | str = "layer_norm",
        residual: Choice | str = "pre",
        position: Choice | str = "learned",
        embedding: Choice | str = "token",
        block: Choice | str = "transformer",
        layers: Sequence[LayerChange] = (),
        decoder_layers: Sequence[LayerChange] = (),
        dropout: Probability = 0.0,
        tie_embeddings: bool = True,
        loss: Loss = "auto",
        logit_scale: Positive = 1.0,
        start_token: Count = 0,
        init: Scheme = "gpt2",
        init_std: NotNegative = 0.02,
        base_width: Size | None = None,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        check_scheme(init, base_width=base_width)
        if start_token >= vocab_size:
            raise ValueError(f"start_token must be in 0..{vocab_size - 1}, got {start_token}")
        super().__init__()
        num_decoder_layers = num_layers if num_decoder_layers is None else num_decoder_layers
        both: dict[str, Any] = {
            "context_length": context_length,
            "attention": attention,
            "feedforward": feedforward,
            "norm": norm,
            "position": position,
            "block": block,
            "dropout": dropout,
            "backend": backend,
            "partition": partition,
        }
        alpha = 0.81 * (num_layers**4 * num_decoder_layers) ** (1 / 16)
        self.encoder = Stack(
            hidden_dim,
            num_layers=num_layers,
            residual=_with_alpha(residual, alpha),
            layers=_layers_with_alpha(layers, alpha),
            causal=False,
            **both,
        )
        alpha = (3 * num_decoder_layers) ** (1 / 4)
        self.decoder = Stack(
            hidden_dim,
            num_layers=num_decoder_layers,
            residual=_with_alpha(residual, alpha),
            layers=_layers_with_alpha(decoder_layers, alpha),
            cross_attention=attention if cross_attention is None else cross_attention,
            causal=True,
            **both,
        )
        self.hidden_dim = hidden_dim
        self.context_length = context_length
        self.dropout = dropout
        self.start_token = start_token
        self.loss: Loss = loss
        self.token = build_token_embedding(embedding, vocab_size=vocab_size, hidden_dim=hidden_dim)
        # A tied head is no module; see Note: [a tied head is no module] in decoder.py.
        self.head = None if tie_embeddings else Linear(hidden_dim, vocab_size, bias=False)
        self.logit_scale = logit_scale * logit_factor(hidden_dim, base_width)
        initialise(
            self,
            init,
            num_layers=num_layers,
            num_decoder_layers=num_decoder_layers,
            std=init_std,
            base_width=base_width,
        )

    def forward(
        self,
        source_BS: Tensor,
        targets_BT: Tensor | None = None,
        *,
        inputs_BT: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the loss if there are targets, else the logits of the tokens that follow the inputs.

        Args:
            source_BS: int64 or int32 [B, S], values in 0 .. V - 1.
            targets_BT: int64 [B, T], the tokens of the target, or -100 for positions that do not count; None for
                logits.
            inputs_BT: int64 or int32 [B, T], the input of the decoder. None for the start token, then all targets but
                the last; the start token also replaces targets of -100.
            key_padding_mask: bool [B, S], True for a real token of the source; None if all are real.

        Returns:
            With targets the mean cross entropy in nats, in training plus the auxiliary losses of the blocks: a float32
            scalar; else the logits [B, T, V].

        Raises:
            TypeError: source, inputs or targets are not a tensor of integers.
            ValueError: neither targets nor inputs, an argument of another shape or dtype, a token outside the
                vocabulary, or a sequence that is too long for its positions.
        """
        if inputs_BT is None:
            assert targets_BT is not None
            inputs_BT = self._shifted(targets_BT)
        memory = self.encode(source_BS, key_padding_mask=key_padding_mask)
        x_BTD = self.decode(inputs_BT, memory, memory_padding_mask=key_padding_mask)
        return self.to_logits(x_BTD) if targets_BT is None else self.to_loss(x_BTD, targets_BT)

    def check_arguments(
        self,
        source_BS: Tensor,
        targets_BT: Tensor | None = None,
        *,
        inputs_BT: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
    ) -> None:
        """Raise the errors of `forward`. A call of the model runs this first."""
        if targets_BT is not None:
            check_tokens(targets_BT, "targets")
        check_tokens(source_BS, "source", table=self.token)
        if inputs_BT is not None:
            check_tokens(inputs_BT, "inputs", table=self.token)
        decoder_BT = targets_BT if inputs_BT is None else inputs_BT
        if decoder_BT is None:
            raise ValueError("there is nothing to predict; pass targets_BT for a loss, or inputs_BT for logits")
        check_like_tokens("key_padding_mask", key_padding_mask, source_BS, dtype=torch.bool, like="source")
        check_like_tokens(
            *("targets", targets_BT, decoder_BT), dtype=torch.int64, like="inputs", table=self.head or self.token
        )
        if len(source_BS) != len(decoder_BT):
            raise ValueError(f"source and target must have as many rows, got {len(source_BS)} and {len(decoder_BT)}")
        self.encoder.position.check_length(source_BS.shape[1])
        self.decoder.position.check_length(decoder_BT.shape[1])

    def encode(self, source_BS: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """Return the memory of a source: [B, S] -> [B, S, D]."""
        x_BSD: Tensor = self.encoder.position(self.token(source_BS))
        x_BSD = dropout_op(x_BSD, self.dropout, training=self.training)
        return self._ended(self.encoder, self.encoder.run_blocks(x_BSD, key_padding_mask=key_padding_mask))

    def decode(
        self,
        inputs_BT: Tensor,
        memory: Tensor,
        *,
        memory_padding_mask: Tensor | None = None,
        caches: Sequence[KeyValueCache] | None = None,
    ) -> Tensor:
        """Return the input of the output layer: [B, T] -> [B, T, D].

        Args:
            inputs_BT: the tokens of the target so far; with caches only those that are not in the caches yet.
            memory: [B, S, D], the result of `encode`.
            memory_padding_mask: the key_padding_mask that `encode` took.
            caches: one per block of the decoder, to which these tokens are added; None for no caches.
        """
        first = caches[0].length if caches else 0
        x_BTD: Tensor = self.decoder.position(self.token(inputs_BT), first=first)
        x_BTD = dropout_op(x_BTD, self.dropout, training=self.training)
        x_BTD = self.decoder.run_blocks(x_BTD, caches=caches, memory=memory, memory_padding_mask=memory_padding_mask)
        return self._ended(self.decoder, x_BTD)

    def example_inputs(self, batch_size: int = 1, device: torch.device | str | None = "meta") -> tuple[Tensor, Tensor]:
        """Return inputs of `forward` in training: source and targets of a full context, [B, T] each, all 0."""
        return self.encoder.example_inputs(batch_size, device)

    @checked
    @torch.no_grad()
    def generate(
        self,
        source_BS: Tensor,
        num_tokens: Count,
        *,
        key_padding_mask: Tensor | None = None,
        temperature: NotNegative = 1.0,
        top_k: Size | None = None,
        top_p: Share | None = None,
        stop_tokens: Collection[int] = (),
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Write a target for each source, token by token, from the last `context_length` tokens.

        It runs in eval mode and restores the mode of every module. Fused modules run eagerly. The encoder runs once.
        Keys and values are cached as in `Decoder.generate`.

        Args:
            source_BS: int64 or int32 [B, S], S at least one.
            num_tokens: how many tokens to write.
            key_padding_mask: bool [B, S], True for a real token of the source; None if all are real.
            temperature, top_k, top_p, stop_tokens, generator: as for `Decoder.generate`.

        Returns:
            [B, n] in the dtype of the source, n = num_tokens, or fewer if all rows have ended: the targets, without the
            start token.

        Raises:
            TypeError: the source is not a tensor of integers.
            ValueError: source or mask have another shape, or a number is out of its range.
        """
        check_tokens(source_BS, "source", table=self.token)
        check_like_tokens("key_padding_mask", key_padding_mask, source_BS, dtype=torch.bool, like="source")
        tokens_BT = source_BS.new_full((len(source_BS), 1), self.start_token)
        draw = functools.partial(next_token, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        with generating(self):
            memory = self.encode(source_BS, key_padding_mask=key_padding_mask)

            def logits_of(newest_BT: Tensor, caches: Sequence[KeyValueCache] | None, _: int) -> Tensor:
                x_BTD = self.decode(newest_BT, memory, memory_padding_mask=key_padding_mask, caches=caches)
                return self.to_logits(x_BTD[:, -1])

            return continued(
                tokens_BT,
                num_tokens,
                logits_of,
                draw,
                context_length=self.context_length,
                new_caches=self.decoder.new_caches,
                stop_tokens=stop_tokens,
            )[:, 1:]

    def _ended(self, stack: Stack, x: Tensor) -> Tensor:
        # As in the released code of T5 (mesh_tensorflow, LayerStack). Without this norm the blocks have already applied
        # dropout.
        return x if stack.norm is None else dropout_op(x, self.dropout, training=self.training)

    def _shifted(self, targets_BT: Tensor) -> Tensor:
        start_B1 = torch.full_like(targets_BT[:, :1], self.start_token)
        inputs_BT = torch.cat((start_B1, targets_BT[:, :-1]), dim=1)
        return inputs_BT.masked_fill(inputs_BT == IGNORED, self.start_token)

    def extra_repr(self) -> str:
        return (
            f"context_length={self.context_length}, dropout={self.dropout}, tie_embeddings={self.head is None}, "
            f"logit_scale={self.logit_scale}"
        )


def _with_alpha(residual: Choice | str, alpha: float) -> Choice | str:
    """Return the residual style; deepnorm without an alpha gets this alpha."""
    choice = as_choice(residual)
    if choice.name != "deepnorm" or choice.options.get("alpha") is not None:
        return residual
    return Choice("deepnorm", {**choice.options, "alpha": alpha})


def _layers_with_alpha(layers: Sequence[LayerChange], alpha: float) -> list[LayerChange]:
    return [
        change if change.residual is None else dataclasses.replace(change, residual=_with_alpha(change.residual, alpha))
        for change in layers
    ]
