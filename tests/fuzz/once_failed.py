"""Examples that `make fuzz` once found wrong: `make test` runs them."""

from tests.fuzz.example import Example

ONCE_FAILED: dict[str, Example] = {}
