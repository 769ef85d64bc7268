import inspect
import math
import re
from typing import Annotated, Any

import numpy as np
import pytest

import fuselayers.components.option as option_module
from fuselayers import build
from fuselayers.components import KINDS, MLP, FusedMLP, MixtureOfExperts, Range, create, get, names, options
from fuselayers.components.option import Count, Probability, Size, checked, described
from fuselayers.components.registry import Choice
from fuselayers.configs import compose

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
        @checked
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
    @checked
    def build(*, width: Size, p: Probability = 0.0, heads: Count | None = None) -> None:
        raise AssertionError("it was called")

    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        build(**arguments)


@pytest.mark.parametrize("hint", [Count | None, Annotated[int | None, Range(minimum=0)]])
def test_none_is_valid_where_the_annotation_names_it(hint: Any) -> None:
    def build(*, heads: Any) -> Any:
        return heads

    build.__annotations__["heads"] = hint
    assert checked(build)(heads=None) is None
    with pytest.raises(ValueError, match="heads must be at least 0, got -1"):
        checked(build)(heads=-1)


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
    with pytest.raises(TypeError, match=f"^{option.name} must be a ((whole )?number( or None)?|list), got '1'$"):
        component(**arguments, **{option.name: "1"})
    path, value = (f"{option.name}[0]", [wrong]) if option.entry else (option.name, wrong)
    with pytest.raises(ValueError, match=f"^{re.escape(path)} must be {bounds}, got {wrong}$"):
        component(**arguments, **{option.name: value})


def test_every_way_to_build_judges_types_and_names() -> None:
    for arguments, text in [
        ({"bias": 1}, "bias must be True or False, got 1"),
        ({"activation": 3}, "activation must be text or None, got 3"),
        ({"activation": "gleu"}, "no activation 'gleu'; did you mean 'gelu'?"),
        ({"expansion": math.inf}, "expansion must be above 0 and finite, got inf"),
    ]:
        for make in (
            lambda **options: MLP(8, **options),
            lambda **options: create("feedforward", Choice("mlp", options), 8),
        ):
            with pytest.raises((TypeError, ValueError), match=f"^{re.escape(text)}"):
                make(**arguments)
    with pytest.raises(ValueError, match=r"^no gating 'topk'; did you mean 'top_k'"):
        MixtureOfExperts(8, gating="topk")  # type: ignore[arg-type]


def test_numbers_of_other_libraries_become_pythons() -> None:
    layer = MLP(np.int64(8), expansion=np.float64(2), dropout=1)  # type: ignore[arg-type]
    assert [type(layer.hidden_dim), type(layer.dropout)] == [int, float]
    vision = get("model", "hierarchical_vision")
    sizes = {name: [4] for name in ("widths", "depths", "patch_sizes", "strides")}
    with pytest.raises(TypeError, match=r"^depths\[0\] must be a whole number, got 1.5$"):
        vision(attention="pooling", image_size=8, num_classes=2, **{**sizes, "depths": [1.5]})


@pytest.fixture
def judgements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths of all values that are judged from now on."""
    paths: list[str] = []
    judged_value = option_module.judged_value

    def recorded(where: str, value: Any, option: Any) -> Any:
        paths.append(where)
        return judged_value(where, value, option)

    monkeypatch.setattr(option_module, "judged_value", recorded)
    return paths


def test_a_build_judges_each_value_of_its_config_once(judgements: list[str]) -> None:
    build("gpt_nano", ["fusion=off", "feedforward=fused_mlp"])
    # Three layers have this option.
    assert [path for path in judgements if path.endswith("expansion")] == ["feedforward.expansion"]
    judgements.clear()
    # FusedMLP passes its options on to MLP.
    FusedMLP(8, expansion=2.0)
    assert judgements.count("expansion") == 1


def test_an_option_that_changes_after_composing_is_judged_again() -> None:
    config = compose("gpt_nano", ["fusion=off"])
    config.feedforward.options["dropout"] = 2  # type: ignore[index]
    with pytest.raises(ValueError, match=r"^dropout must be at least 0 and at most 1, got 2$"):
        build(config)


@pytest.mark.parametrize("indent", ["", "    ", 12 * " "])
def test_the_indent_of_a_docstring_does_not_matter(indent: str) -> None:
    class Layer:
        def __init__(self, *, width: int, depth: int, other: int = 0) -> None: ...

    lines = [
        "Args:",
        "  width: how wide",
        "    it is.",
        "  depth: how deep: in layers.",
        "",
        "Raises:",
        "  ValueError: no.",
    ]
    Layer.__doc__ = f"A layer.\n\n{chr(10).join(indent + line for line in lines)}"
    assert [option.doc for option in described(Layer).values()] == ["how wide it is.", "how deep: in layers.", ""]
