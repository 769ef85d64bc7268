"""linear_cross_entropy -- the loss of a language model's last layer, without all logits in memory."""

from .call import linear_cross_entropy as linear_cross_entropy
from .call import linear_cross_entropy_reference as linear_cross_entropy_reference
