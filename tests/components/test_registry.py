import re
from typing import Any, ClassVar, Literal

import pytest
from torch import nn

from fuselayers import components
from fuselayers.components.option import REQUIRED, Option, accepted, create, options
from fuselayers.components.registry import KINDS, Choice, get, names, register

EVERY_COMPONENT = [(kind, name) for kind in KINDS for name in names(kind)]


pytestmark = pytest.mark.usefixtures("own_components")


class Shape(nn.Module):
    """A component with arguments of every sort.

    Args:
        size: how large it is,
            in metres.
        colour: its colour: red or blue.
        backend: filled in by the builder.

    Raises:
        ValueError: never.
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"backend"})

    def __init__(
        self,
        width: int,
        *,
        size: float,
        colour: Literal["red", "blue"] = "red",
        secret: int | None = None,
        backend: str | None = None,
    ) -> None:
        super().__init__()
        self.arguments = (width, size, colour, secret, backend)


@pytest.mark.parametrize(("kind", "name"), EVERY_COMPONENT)
def test_every_registered_class_is_public_and_every_option_is_typed_and_explained(kind: str, name: str) -> None:
    component = get(kind, name)
    assert getattr(components, component.__name__) is component
    for option in options(kind, name):
        assert option.doc, f"{name}.{option.name} has no entry under Args"
        assert option.doc[-1] in ".1", f"{name}.{option.name}: {option.doc!r} is cut off"
        assert option.annotation is not Any, f"{name}.{option.name} has no type"
        assert option.name not in {"backend", "partition", "causal"}


def test_options_come_from_the_signature_and_the_docstring() -> None:
    register("norm", "shape")(Shape)
    assert options("norm", "shape") == (
        Option("size", float, REQUIRED, "how large it is, in metres."),
        Option("colour", Literal["red", "blue"], "red", "its colour: red or blue."),
        Option("secret", int | None, None, ""),
    )


def test_a_second_owner_is_refused_and_the_first_one_stays() -> None:
    text = (
        "feedforward 'mlp' belongs to fuselayers.components.feedforward.mlp.MLP; choose another name for "
        f"{Shape.__module__}.Shape"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        register("feedforward", "mlp")(Shape)
    assert get("feedforward", "mlp") is components.MLP


@pytest.mark.parametrize("module", ["__main__", "users_module"])
def test_a_notebook_cell_or_a_module_may_run_twice(module: str) -> None:
    def cell() -> type:
        return register("norm", "mine")(type("Mine", (nn.Module,), {"__module__": module}))

    cell()
    second = cell()
    assert get("norm", "mine") is second


@pytest.mark.parametrize("name", ["", "MyNorm", "my-norm", "my norm", "9norm", "torch.nn.LayerNorm"])
def test_a_name_that_no_config_could_hold_is_refused(name: str) -> None:
    text = f"the name of a norm must be in lower_case letters, digits and underscores, got {name!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        register("norm", name)


EVERY_KIND = "there are: activation, attention, block, embedding, feedforward, fused, model, norm, position, residual"


@pytest.mark.parametrize("use", [names, lambda kind: get(kind, "mlp"), lambda kind: register(kind, "x")])
def test_an_unknown_kind(use: object) -> None:
    with pytest.raises(ValueError, match=f"^no kind 'feedfoward'; did you mean 'feedforward'\\? {EVERY_KIND}$"):
        use("feedfoward")


@pytest.mark.parametrize("use", [get, create, options, accepted])
def test_an_unknown_name(use: object) -> None:
    every = "conv_mlp, fused_mlp, gated_mlp, mixture_of_experts, mlp"
    text = rf"^no feedforward 'mpl'; did you mean 'mlp'\? there are: {every}$"
    with pytest.raises(ValueError, match=text):
        use("feedforward", "mpl")


@pytest.mark.parametrize(
    ("kind", "choice", "built_in", "text"),
    [
        (
            "attention",
            Choice("multi_head", {"num_heads": 2, "causal": False}),
            {},
            "'causal' is not an option of attention 'multi_head': the model sets it (a decoder to True); leave it out",
        ),
        (
            "feedforward",
            "mlp",
            {"backend": "eager"},
            "feedforward 'mlp' (fuselayers.components.feedforward.mlp.MLP) does not take the argument 'backend'",
        ),
        (
            "feedforward",
            Choice("mlp", {"bias": True}),
            {"bias": False},
            "mlp option 'bias' is set by the builder; leave it out of the options",
        ),
    ],
)
def test_what_create_refuses(kind: str, choice: Choice | str, built_in: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        create(kind, choice, 4, **built_in)
