"""Pure functions, one file for one op: formula, checks, reference, kernels. `implementations` dispatches the calls."""

from ..other_names import missing_attribute as __getattr__  # noqa: F401
from .activations import ACTIVATIONS as ACTIVATIONS
from .activations import activate as activate
from .activations import check_activation as check_activation
from .attention import attention as attention
from .bias_activation_dropout import bias_activation_dropout as bias_activation_dropout
from .bias_dropout_residual import bias_dropout_residual as bias_dropout_residual
from .bias_dropout_residual_layer_norm import bias_dropout_residual_layer_norm as bias_dropout_residual_layer_norm
from .bias_dropout_residual_rms_norm import bias_dropout_residual_rms_norm as bias_dropout_residual_rms_norm
from .cross_entropy import cross_entropy as cross_entropy
from .draw import draw_seed as draw_seed
from .dropout import dropout as dropout
from .gated_activation import gated_activation as gated_activation
from .layer_norm import layer_norm as layer_norm
from .linear import linear as linear
from .linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .linear_cross_entropy import linear_log_prob as linear_log_prob
from .normalise import NormStyle as NormStyle
from .normalise import check_style as check_style
from .philox import check_probability as check_probability
from .philox import keep_mask as keep_mask
from .philox import keep_scale as keep_scale
from .residual_layer_norm import residual_layer_norm as residual_layer_norm
from .residual_rms_norm import residual_rms_norm as residual_rms_norm
from .rms_norm import rms_norm as rms_norm
from .rotary import rotary as rotary
from .shards import Shard as Shard
from .softmax import log_softmax as log_softmax
from .softmax import softmax as softmax
