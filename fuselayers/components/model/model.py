"""What every model offers beside its forward."""

from typing import ClassVar

import torch
from torch import Tensor, nn

__all__ = ["Model"]


class Model(nn.Module):
    """The base of the models.

    >>> model = Model()
    >>> model.layer = nn.Linear(2, 3)
    >>> model.num_parameters()
    9
    """

    # What `fuselayers.build` fills in.
    built_in: ClassVar[frozenset[str]] = frozenset(
        {"attention", "feedforward", "norm", "residual", "position", "backend", "partition"}
    )

    def num_parameters(self) -> int:
        """Return how many numbers the model learns or could learn, frozen ones too; what is tied counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def auxiliary_loss(self) -> Tensor | None:
        """Return the sum of what the model's parts added to the loss in their last forward, as a router does.

        In training a model adds it to its own loss. None where no part has one, as in eval mode.
        """
        found = [getattr(module, "auxiliary_loss", None) for module in self.modules()]
        losses = [loss for loss in found if isinstance(loss, Tensor)]
        return torch.stack(losses).sum() if losses else None

    def with_auxiliary_loss(self, loss: Tensor) -> Tensor:
        """Return a loss with the parts' own added to it.

        Raises:
            RuntimeError: the loss has a gradient and a part's own has none, though its router learns.
        """
        auxiliary = self.auxiliary_loss()
        if auxiliary is None:
            return loss
        if loss.requires_grad and not torch.compiler.is_compiling():
            self._check_gradients()
        return loss + auxiliary

    def _check_gradients(self) -> None:
        for name, module in self.named_modules():
            own = getattr(module, "auxiliary_loss", None)
            if not isinstance(own, Tensor) or own.requires_grad:
                continue
            # The loss of a frozen router may well be a constant. A part without a router learns if anything in it does.
            router = getattr(module, "router", None)
            learning = router if isinstance(router, nn.Module) else module
            if any(parameter.requires_grad for parameter in learning.parameters()):
                raise RuntimeError(
                    f"the auxiliary loss of {name} has no gradient: it was computed without a graph, as "
                    "checkpoint(use_reentrant=True) does; take use_reentrant=False"
                )
