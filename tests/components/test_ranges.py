import inspect
import math
import re
from typing import Annotated, Any

import numpy as np
import pytest

from fuselayers.components import KINDS, Range, get, names, options
from fuselayers.components.ranges import Count, Probability, Share, Size, in_range, range_of
from fuselayers.components.registry import Choice

NUMBERS = [
    (kind, name, option)
    for kind in KINDS
    for name in names(kind)
    for option in options(kind, name)
    if option.range is not None
]
# Further arguments that some constructors require.
ARGUMENTS = {
    "hidden_dim": 8,
    "num_heads": 2,
    "context_length": 16,
    "vocab_size": 10,
    "num_layers": 1,
    "attention": Choice("multi_head", {"num_heads": 2}),
    "causal": True,
    "p": 0.1,
    "d_model": 8,
    "image_size": 8,
    "patch_size": 4,
    "num_classes": 3,
    "widths": [8],
    "depths": [1],
    "patch_sizes": [4],
    "strides": [4],
}


def test_arguments_are_checked_before_the_constructor_runs() -> None:
    built = []

    class Layer:
        @in_range
        def __init__(self, width: Size, *, p: Probability = 0.0, heads: Count | None = None) -> None:
            built.append((width, p, heads))

    Layer(3, p=0.5)
    Layer(width=3, heads=0)
    for arguments, text in [
        (((0,), {}), "width must be at least 1, got 0"),
        (((3,), {"p": 2}), "p must be at least 0 and at most 1, got 2"),
        (((3,), {"p": math.nan}), "p must be at least 0 and at most 1 and finite, got nan"),
        (((3,), {"heads": -1}), "heads must be at least 0, got -1"),
    ]:
        with pytest.raises(ValueError, match=f"^{text}$"):
            Layer(*arguments[0], **arguments[1])
    with pytest.raises(TypeError, match="depth"):
        Layer(3, depth=1)
    assert built == [(3, 0.5, None), (3, 0.0, 0)]
    assert list(inspect.signature(Layer).parameters) == ["width", "p", "heads"]
    assert range_of(Share) == Range(above=0, maximum=1)


WHOLE = "must be a whole number, got"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"width": 2.5}, f"width {WHOLE} 2.5"),
        ({"width": True}, f"width {WHOLE} True"),
        ({"width": np.float32(2)}, f"width {WHOLE} {np.float32(2)!r}"),
        ({"width": 3, "p": "0.1"}, "p must be a number, got '0.1'"),
        ({"width": 3, "p": False}, "p must be a number, got False"),
        ({"width": 3, "p": None}, "p must be a number, got None"),
    ],
)
def test_what_is_no_number_of_its_type(arguments: dict[str, object], text: str) -> None:
    @in_range
    def build(*, width: Size, p: Probability = 0.0, heads: Count | None = None) -> None:
        raise AssertionError("it was called")

    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        build(**arguments)


@pytest.mark.parametrize("hint", [Count | None, Annotated[int | None, Range(minimum=0)]])
def test_none_is_valid_where_the_annotation_names_it(hint: Any) -> None:
    def build(*, heads: Any) -> Any:
        return heads

    build.__annotations__["heads"] = hint
    assert in_range(build)(heads=None) is None
    with pytest.raises(ValueError, match="heads must be at least 0, got -1"):
        in_range(build)(heads=-1)


@pytest.mark.parametrize(("kind", "name", "option"), NUMBERS, ids=lambda value: getattr(value, "name", value))
def test_every_component_refuses_what_is_no_number_or_out_of_its_ranges(kind: str, name: str, option: object) -> None:
    bounds: Range = option.range
    lowest = bounds.minimum if bounds.minimum is not None else bounds.above
    wrong = int(lowest) - 1 if lowest is not None else int(bounds.maximum or bounds.below or 0) + 1
    component = get(kind, name)
    wanted = inspect.signature(component).parameters.values()
    arguments = {
        parameter.name: ARGUMENTS[parameter.name]
        for parameter in wanted
        if parameter.name in ARGUMENTS and parameter.name != option.name
    }
    with pytest.raises(TypeError, match=f"^{option.name} must be a (whole )?number, got '1'$"):
        component(**arguments, **{option.name: "1"})
    with pytest.raises(ValueError, match=f"^{option.name} must be {bounds}, got {wrong}$"):
        component(**arguments, **{option.name: wrong})
