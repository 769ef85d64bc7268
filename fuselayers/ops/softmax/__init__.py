"""softmax and log_softmax over the last dimension, with masks."""

from .call import log_softmax as log_softmax
from .call import log_softmax_reference as log_softmax_reference
from .call import softmax as softmax
from .call import softmax_reference as softmax_reference
