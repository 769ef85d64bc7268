"""The module path of xFormers' fused layers. Importing one raises an error that names its replacement."""

from ..other_names import missing_attribute as __getattr__  # noqa: F401
