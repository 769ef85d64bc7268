"""What every model offers beside its forward."""

from torch import nn

__all__ = ["Model"]


class Model(nn.Module):
    """The base of the models.

    >>> model = Model()
    >>> model.layer = nn.Linear(2, 3)
    >>> model.num_parameters()
    9
    """

    def num_parameters(self) -> int:
        """Return how many numbers the model learns or could learn, frozen ones too; what is tied counts once."""
        return sum(parameter.numel() for parameter in self.parameters())
