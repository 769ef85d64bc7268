"""encoder -- a masked language model: a token is predicted from the tokens on both sides of it.

    tokens, targets, segments   [B, T]      B batch, T tokens
    x                           [B, T, D]   D model
    logits                      [B, T, V]   V vocabulary

It is BERT (Devlin et al. 2018) with learned positions and the residual style post.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from ...ops import activate
from ...ops import dropout as dropout_op
from ..init import Scheme, check_scheme, initialise, logit_factor
from ..linear import Linear
from ..norm import Norm
from ..option import Count, NotNegative, Probability, Size, checked, create
from ..registry import Choice, register
from .layers import LayerChange
from .stack import Stack
from .tokens import (
    Loss,
    ModelWithHead,
    build_token_embedding,
    check_like_tokens,
    check_tokens,
)


@register("model", "encoder")
class Encoder(ModelWithHead, Stack):
    """An encoder-only transformer, which predicts masked tokens.

    The arguments and errors of `Model`, and:

    Args:
        norm: the norm and its options, for the embeddings, the blocks and the head.
        num_segments: number of segments a sequence may consist of; 0 for no segment embeddings.

    >>> heads = Choice("multi_head", {"num_heads": 2})
    >>> model = Encoder(vocab_size=10, hidden_dim=8, num_layers=1, context_length=4, attention=heads)
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 10])
    """

    logit_soft_cap = None

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
        num_segments: Count = 2,
        residual: Choice | str = "post",
        position: Choice | str = "learned",
        embedding: Choice | str = "token",
        block: Choice | str = "transformer",
        layers: Sequence[LayerChange] = (),
        dropout: Probability = 0.0,
        tie_embeddings: bool = True,
        loss: Loss = "auto",
        init: Scheme = "bert",
        init_std: NotNegative = 0.02,
        base_width: Size | None = None,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        check_scheme(init, base_width=base_width)
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
            causal=False,
            backend=backend,
            partition=partition,
        )
        self.token = build_token_embedding(embedding, vocab_size=vocab_size, hidden_dim=hidden_dim)
        self.segment = nn.Embedding(num_segments, hidden_dim) if num_segments else None
        self.embedding_norm: Norm = create("norm", norm, hidden_dim)
        self.head_dense = Linear(hidden_dim, hidden_dim)
        self.head_norm: Norm = create("norm", norm, hidden_dim)
        # See Note: [a tied head is no module] in decoder.py. The bias is separate from the head.
        self.head = None if tie_embeddings else Linear(hidden_dim, vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(vocab_size))
        self.loss: Loss = loss
        self.logit_scale = logit_factor(hidden_dim, base_width)
        initialise(self, init, num_layers=num_layers, std=init_std, base_width=base_width)

    def forward(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        segments_BT: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the logits, or the loss if there are targets.

        Args:
            tokens_BT: int64 or int32 [B, T], values in 0 .. V - 1.
            targets_BT: int64 [B, T], the token that was masked, or -100 for positions that do not count; None for
                logits.
            segments_BT: int64 or int32 [B, T], the segment of each token; None for segment 0 everywhere.
            key_padding_mask: bool [B, T], True for a real token; None if all are real.
            mask: as for `Decoder.forward`.
            document_ids: as for `Decoder.forward`.

        Returns:
            The logits [B, T, V]; with targets the mean cross entropy in nats, in training plus the auxiliary losses of
            the blocks: a float32 scalar.

        Raises:
            TypeError: tokens or segments are not a tensor of integers.
            ValueError: an argument of another shape or dtype, a token outside the vocabulary, segments for a model
                without them, a sequence that is too long for its positions, a mask or documents that the attention
                cannot use, or documents in a model whose feedforward mixes tokens.
        """
        x_BTD = self.features(
            tokens_BT,
            segments_BT=segments_BT,
            key_padding_mask=key_padding_mask,
            mask=mask,
            document_ids=document_ids,
        )
        x_BTD = self.head_norm(activate(self.head_dense(x_BTD), "gelu"))
        return self.to_logits(x_BTD) if targets_BT is None else self.to_loss(x_BTD, targets_BT)

    def check_arguments(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor | None = None,
        *,
        segments_BT: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        document_ids: Tensor | None = None,
    ) -> None:
        """Raise the errors of `forward`. A call of the model runs this first."""
        check_tokens(tokens_BT, table=self.token)
        check_like_tokens("targets", targets_BT, tokens_BT, dtype=torch.int64, table=self.head or self.token)
        check_like_tokens("key_padding_mask", key_padding_mask, tokens_BT, dtype=torch.bool)
        if segments_BT is not None:
            if self.segment is None:
                raise ValueError(
                    "this model has no segment embeddings; build it with num_segments, or leave segments out"
                )
            check_tokens(segments_BT, "segments", table=self.segment)
            check_like_tokens("segments", segments_BT, tokens_BT, dtype=segments_BT.dtype)
        self.check_documents(tokens_BT, mask, document_ids)
        self.position.check_length(tokens_BT.shape[1])

    def features(
        self,
        tokens_BT: Tensor,
        *,
        segments_BT: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        document_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the head: [B, T] -> [B, T, D]."""
        x_BTD: Tensor = self.position(self.token(tokens_BT))
        if self.segment is not None:
            # Without segments_BT every token is in the first segment.
            first_D = self.segment.weight[0]
            x_BTD = x_BTD + (first_D if segments_BT is None else self.segment(segments_BT))
        x_BTD = dropout_op(self.embedding_norm(x_BTD), self.dropout, training=self.training)
        return self.run_blocks(x_BTD, key_padding_mask=key_padding_mask, mask=mask, documents=document_ids)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tie_embeddings={self.head is None}"
