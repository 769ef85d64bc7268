"""The loss of a language model's last layer, and the log-probabilities of its tokens, without all logits in memory."""

from .call import linear_cross_entropy as linear_cross_entropy
from .call import linear_cross_entropy_reference as linear_cross_entropy_reference
from .log_prob import linear_log_prob as linear_log_prob
from .log_prob import linear_log_prob_reference as linear_log_prob_reference
