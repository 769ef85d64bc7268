"""hooks -- the hooks of all modules, `torch.nn.modules.module.register_module_forward_hook` and its kin."""

from torch.nn.modules import module


def hooks_of_all_modules() -> bool:
    """Return whether there is such a hook."""
    return bool(module._has_any_global_hook())  # type: ignore[no-untyped-call]
