"""The base of the models."""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...names import no_such
from ...partition import FusedModule
from ..layout import WHOLE, Layout


class Model(nn.Module):
    """The base of the models. Each model takes the arguments below that its signature lists.

    Args:
        vocab_size: V, number of different tokens.
        hidden_dim: D, the width of the model.
        num_layers: number of blocks.
        context_length: longest sequence in tokens that it is trained on.
        attention: the attention and its options.
        feedforward: the feedforward and its options.
        norm: the norm and its options, for the blocks and, if these leave the stream unnormalised, the end of the
            stack.
        residual: the residual style and its options.
        position: the kind of position and its options.
        embedding: the embedding of the tokens and its options.
        block: the kind of block, by name or with its options.
        layers: other components for some of the blocks, see `LayerChange`.
        dropout: probability of dropping a value of the embeddings and of each sublayer's output, 0 <= dropout <= 1.
        tie_embeddings: whether the output layer uses the table of the token embeddings.
        loss: "fused" computes the loss in chunks of tokens, without all logits in memory; it is differentiable once.
            "plain" computes the logits. "auto" is fused for a vocabulary of 4,096 tokens or more, where it takes 0.7 to
            1.1 times as long. With a cap, or with hooks, an adapter or a bias in the output layer itself, "auto"
            computes the logits and "fused" raises an error.
        logit_scale: factor of the logits, 0.0625 in Cohere's Command R.
        init: how the initial weights are drawn, see `initialise`.
        init_std: their standard deviation, if the scheme does not set it.
        base_width: the hidden_dim at which init_std and the learning rate were tuned; for the scheme mup, with which
            the logits are multiplied by base_width / hidden_dim.
        backend: of the fused layers: "auto" calls their ops, a name runs them through `fuse`.
        partition: how `fuse` chooses the values saved for backward; the backend "auto" does not use it.

    Raises:
        ValueError: an unknown name or option, sizes that do not fit, positions that an attention cannot use, or a
            number out of its range.
        TypeError: a norm, residual style or position is not a subclass of the base of its kind.

    >>> model = Model()
    >>> model.layer = nn.Linear(2, 3)
    >>> model.num_parameters()
    9
    """

    # The arguments that `fuselayers.build` fills in.
    built_in: ClassVar[frozenset[str]] = frozenset(
        {"attention", "feedforward", "norm", "residual", "position", "backend", "partition"}
    )

    layout: Layout = WHOLE

    def __init_subclass__(cls) -> None:
        """Drop the parent's check if the class defines a forward, which may take other arguments."""
        super().__init_subclass__()
        own = vars(cls)
        if "forward" in own and "check_arguments" not in own and not issubclass(cls, FusedModule):
            cls.check_arguments = Model.check_arguments  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Check the arguments, then call the module as torch does.

        The check is not in `forward`, because a compiler traces that: an error would lose its text there, and an index
        out of range would end the process.
        """
        if not torch.compiler.is_compiling():
            try:
                self.check_arguments(*args, **kwargs)
            except TypeError as error:
                known = inspect.signature(self.check_arguments).parameters
                unknown = [name for name in kwargs if name not in known]
                if unknown and "unexpected keyword argument" in str(error):
                    title = f"argument of {type(self).__name__}.forward"
                    raise TypeError(no_such(title, unknown[0], known)) from None
                # Users call `forward`, which takes the same arguments.
                raise TypeError(str(error).replace("check_arguments()", "forward()")) from error
        return super().__call__(*args, **kwargs)

    def check_arguments(self, *args: Any, **kwargs: Any) -> None:
        """Raise the errors of `forward`, whose arguments it takes. A class with its own forward inherits no check."""

    def num_parameters(self) -> int:
        """Return the number of parameters, including frozen ones; a tied parameter counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def auxiliary_loss(self) -> Tensor | None:
        """Return the sum of the auxiliary losses of the last forward, such as those of routers.

        An auxiliary loss is a tensor that a module sets as its own attribute `auxiliary_loss`; a property or a buffer
        of that name does not count. In training a model adds the sum to its own loss. None if no module has one, as in
        eval mode.
        """
        # getattr would raise and catch an error for every module without the attribute.
        attributes = [vars(module).get("auxiliary_loss") for module in self.modules()]
        losses = [loss for loss in attributes if isinstance(loss, Tensor)]
        return torch.stack(losses).sum() if losses else None

    def with_auxiliary_loss(self, loss: Tensor) -> Tensor:
        """Return a loss plus the auxiliary losses.

        Raises:
            RuntimeError: the loss has a gradient and an auxiliary loss has none, although its router is trainable.
        """
        auxiliary = self.auxiliary_loss()
        if auxiliary is None:
            return loss
        if loss.requires_grad and not torch.compiler.is_compiling():
            self._check_gradients()
        return loss + self.layout.once(auxiliary)

    def _check_gradients(self) -> None:
        for name, module in self.named_modules():
            own = vars(module).get("auxiliary_loss")
            if not isinstance(own, Tensor) or own.requires_grad:
                continue
            # The loss of a frozen router is a constant. A module without a router is trainable if any of its parameters
            # is.
            router = getattr(module, "router", None)
            learning = router if isinstance(router, nn.Module) else module
            if any(parameter.requires_grad for parameter in learning.parameters()):
                raise RuntimeError(
                    f"the auxiliary loss of {name} has no gradient: it was computed without a graph, as "
                    "checkpoint(use_reentrant=True) does; use use_reentrant=False"
                )
