"""The base of the models."""

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

    # The arguments that `fuselayers.build` fills in.
    built_in: ClassVar[frozenset[str]] = frozenset(
        {"attention", "feedforward", "norm", "residual", "position", "backend", "partition"}
    )

    def num_parameters(self) -> int:
        """Return the number of parameters, also of frozen ones; a tied parameter counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def auxiliary_loss(self) -> Tensor | None:
        """Return the sum of the auxiliary losses in the last forward, as those of routers.

        In training a model adds it to its own loss. None if no module has one, as in eval mode.
        """
        found = [getattr(module, "auxiliary_loss", None) for module in self.modules()]
        losses = [loss for loss in found if isinstance(loss, Tensor)]
        return torch.stack(losses).sum() if losses else None

    def with_auxiliary_loss(self, loss: Tensor) -> Tensor:
        """Return a loss plus the auxiliary losses.

        Raises:
            RuntimeError: the loss has a gradient and an auxiliary loss has none, although its router learns.
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
            # The loss of a frozen router is a constant. A module without a router learns if any parameter of it does.
            router = getattr(module, "router", None)
            learning = router if isinstance(router, nn.Module) else module
            if any(parameter.requires_grad for parameter in learning.parameters()):
                raise RuntimeError(
                    f"the auxiliary loss of {name} has no gradient: it was computed without a graph, as "
                    "checkpoint(use_reentrant=True) does; take use_reentrant=False"
                )
