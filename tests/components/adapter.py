import torch
from torch import Tensor, nn


class Adapter(nn.Module):
    """A low-rank adapter around a linear layer. It shows the weight and bias of the layer."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.low = nn.Parameter(torch.randn(1, layer.in_features))
        self.high = nn.Parameter(torch.randn(layer.out_features, 1))

    @property
    def weight(self) -> Tensor:
        return self.layer.weight

    @property
    def bias(self) -> Tensor:
        return self.layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.low.T @ self.high.T
