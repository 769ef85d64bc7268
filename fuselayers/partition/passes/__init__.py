"""Passes: each file changes a graph in one way; each lints and recompiles what it changed."""

from .checkpoint_tags import checkpoint_tags_pass as checkpoint_tags_pass
from .compress_saved import COMPRESSED_FROM as COMPRESSED_FROM
from .compress_saved import Compression as Compression
from .compress_saved import compress_saved_pass as compress_saved_pass
from .compress_saved import compression as compression
from .compress_saved import held_by_caller as held_by_caller
from .compress_saved import is_rounding_seed as is_rounding_seed
from .compress_saved import way_for as way_for
from .early_getitems import early_getitems_pass as early_getitems_pass
from .keep_mutated_inputs import keep_mutated_inputs_pass as keep_mutated_inputs_pass
from .late_recompute import late_recompute_pass as late_recompute_pass
from .merge_equal_nodes import merge_equal_nodes_pass as merge_equal_nodes_pass
from .one_mask import one_mask_pass as one_mask_pass
from .recompute_again import AGAIN as AGAIN
from .recompute_again import recompute_again_pass as recompute_again_pass
from .seeded_dropout import MASK_OPS as MASK_OPS
from .seeded_dropout import SEED_OP as SEED_OP
from .seeded_dropout import plain_dropout_calls_pass as plain_dropout_calls_pass
from .seeded_dropout import replayed_dropout_pass as replayed_dropout_pass
from .seeded_dropout import seeded_dropout_calls_pass as seeded_dropout_calls_pass
from .seeded_dropout import seeded_dropout_pass as seeded_dropout_pass
from .sensitive_values import Sensitive as Sensitive
from .sensitive_values import sensitive_in as sensitive_in
from .tables_once import tables_once_pass as tables_once_pass
from .unread_collectives import unread_collectives_pass as unread_collectives_pass
from .views_that_copy import views_that_copy_pass as views_that_copy_pass
