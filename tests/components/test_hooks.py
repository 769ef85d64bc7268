import pytest
from torch import nn

from fuselayers.components.hooks import has_hooks


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_every_hook_of_the_module_itself_counts_until_it_is_removed(register: str) -> None:
    layer = nn.Linear(2, 3)
    handle = getattr(layer, register)(lambda *_: None)
    assert has_hooks(layer)
    assert not has_hooks(nn.Sequential(layer))
    handle.remove()
    assert not has_hooks(layer)
