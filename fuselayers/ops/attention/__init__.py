"""attention -- a weighted mean of values, by a softmax over the allowed keys; see `call` for the formula."""

from .call import attention as attention
from .formula import attention_reference as attention_reference
