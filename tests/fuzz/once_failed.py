"""Examples that `make fuzz` once found wrong: `make test` runs them."""

from tests.fuzz.example import Example

ONCE_FAILED = {
    # Inductor drew the mask that nothing reads after the seed.
    "a dropout that nothing reads before one of this library": Example(
        """\
def make():
    def function(x0):
        t0 = F.dropout(x0, 0.3)
        return fl.ops.dropout(x0, 0.3)

    return function


def inputs(rand, B):
    return rand(B, 16),
""",
        {"backend": "inductor", "torch_random": True},
    ),
}
