"""Where xFormers had its fused layers: an import from here says what they are called now."""

from ..other_names import missing_attribute as __getattr__  # noqa: F401
