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
        """Return a loss with the parts' own added to it."""
        auxiliary = self.auxiliary_loss()
        return loss if auxiliary is None else loss + auxiliary
