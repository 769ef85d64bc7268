"""cross_entropy -- the loss of a row of logits; see `call`."""

from .call import cross_entropy as cross_entropy
from .call import fused_cross_entropy as fused_cross_entropy
from .formula import cross_entropy_reference as cross_entropy_reference
from .kernels import fused_loss as fused_loss
from .kernels import fused_loss_gradients as fused_loss_gradients
