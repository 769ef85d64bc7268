"""The contract of this library's ops, for any library: `check` tests a function, `check_module` a layer.

Import it with `import fuselayers.testing`. It needs no test framework.
"""

from .checks import NotApplicable as NotApplicable
from .checks import check_autocast as check_autocast
from .checks import check_double_backward as check_double_backward
from .checks import check_dynamic as check_dynamic
from .checks import check_fused as check_fused
from .checks import check_mixed_dtypes as check_mixed_dtypes
from .checks import check_not_finite as check_not_finite
from .checks import check_poisoned as check_poisoned
from .checks import check_single_gradients as check_single_gradients
from .checks import check_transforms as check_transforms
from .checks import poisoned_memory as poisoned_memory
from .comparison import DTYPES as DTYPES
from .comparison import SLACK as SLACK
from .comparison import assert_as_good_as as assert_as_good_as
from .comparison import results as results
from .comparison import samples as samples
from .layouts import LAYOUTS as LAYOUTS
from .layouts import check_layouts as check_layouts
from .matrix import CHECKS as CHECKS
from .matrix import Cell as Cell
from .matrix import Report as Report
from .matrix import check as check
from .matrix import check_module as check_module
