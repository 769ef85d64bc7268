"""Errors for the names of another library, and for options in the wrong section."""

import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers import build, components
from fuselayers.components import Choice, create, register
from fuselayers.configs import compose


def _error(*overrides: str) -> str:
    with pytest.raises(ValueError, match=r"(no|not an) ") as caught:
        compose("gpt_nano", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "text"),
    # One case for each group, and each form of advice.
    [
        ("model.d_model=64", "no decoder option 'd_model'; did you mean 'hidden_dim'? there are: "),
        ("residual=gpt_neox", "no residual 'gpt_neox'; did you mean 'parallel' with separate_norms=true? "),
        ("attention.n_heads=2", "no multi_head option 'n_heads'; did you mean 'num_heads'? "),
        ("feedforward.mlp_ratio=2", "no fused_mlp option 'mlp_ratio'; did you mean 'expansion'? "),
        ("train.lr=1", "no train option 'lr'; did you mean 'learning_rate'? "),
        ("feedforward.activation=swish", "no activation 'swish'; did you mean 'silu'? "),
        ("ffn=mlp", "no config group 'ffn'; did you mean 'feedforward'? "),
        # An option of another section is named with its path.
        ("d_model=2", "no config group 'd_model'; did you mean 'model.hidden_dim'? "),
        (
            "dropout=0",
            "no config group 'dropout'; did you mean 'model.dropout' or 'feedforward.dropout' or 'attention.dropout'? ",
        ),
        ("feedforward.backend=eager", "no fused_mlp option 'backend'; did you mean 'fusion.backend'? "),
    ],
)
def test_another_librarys_name(override: str, text: str) -> None:
    assert _error(override).startswith(text)


def test_an_option_of_another_component_and_one_that_the_model_sets() -> None:
    assert _error("feedforward.num_experts=4").endswith("; mixture_of_experts has it")
    assert _error("attention.causal=true") == (
        "'causal' is not an option of attention 'multi_head': the model sets it (a decoder to True); leave it out"
    )


@pytest.fixture
def _own(own_components: None) -> None:
    """A user's components: an option by position, an argument that nothing sets, an attention without `causal`."""

    @register("feedforward", "by_position")
    class ByPosition(nn.Module):
        def __init__(self, hidden_dim: int, times: float = 3.0) -> None:
            super().__init__()

    @register("feedforward", "needs_more")
    class NeedsMore(nn.Module):
        def __init__(self, hidden_dim: int, times: float) -> None:
            super().__init__()

    @register("attention", "sees_all")
    class SeesAll(nn.Module):
        def __init__(self, hidden_dim: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return x


@pytest.mark.usefixtures("_own")
def test_an_option_that_is_not_keyword_only() -> None:
    text = (
        r"'times' of feedforward 'by_position' \(.*ByPosition\) is not an option, since it is not keyword-only; "
        r"write \* before it in __init__$"
    )
    assert re.match(text, _error("feedforward=by_position", "feedforward.times=2"))
    with pytest.raises(ValueError, match=text):
        create("feedforward", Choice("by_position", {"times": 2}), 8)
    with pytest.raises(
        TypeError,
        match=r"feedforward 'needs_more' \(.*NeedsMore\) cannot be built: missing a required argument: 'times'; "
        r"a builder gives the sizes of its kind by position, and options of a config must be keyword-only, after \* in",
    ):
        build("gpt_nano", ["feedforward=needs_more"])


@pytest.mark.usefixtures("_own")
def test_an_attention_without_causal() -> None:
    with pytest.raises(ValueError, match=r"attention 'sees_all' cannot hide the tokens that follow, which .* "
                       r"needs; those that can: .*; if .*SeesAll can, its __init__ must take 'causal'$"):  # fmt: skip
        build("gpt_nano", ["attention=sees_all"])
    with pytest.raises(ValueError, match=r"'fourier_mix' cannot hide .* pooling$"):
        build("gpt_nano", ["attention=fourier_mix"])


def test_a_dict_as_xformers_takes_it() -> None:
    text = (
        r"a component is given by its name or as a Choice, Choice\('mlp', \{'expansion': 2.0\}\), got a dict; its "
        r"sizes are arguments of create: create\('feedforward', choice, 64\)"
    )
    with pytest.raises(TypeError, match=text):
        create("attention", {"name": "multi_head", "num_heads": 4, "dim_model": 64})  # type: ignore[arg-type]


def test_a_wrong_call_of_a_class_names_it() -> None:
    with pytest.raises(
        TypeError, match=r"^FusedMLP: too many positional arguments; it takes hidden_dim, and by name expansion, wid"
    ):
        components.FusedMLP(64, 256)  # type: ignore[misc]
    with pytest.raises(TypeError, match=r"^FusedMLP: missing a required argument: 'hidden_dim'; it takes hidden_dim"):
        components.FusedMLP()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^no FusedMLP argument 'd_ff'; did you mean 'width'\? there are: activation"):
        components.FusedMLP(64, d_ff=256)  # type: ignore[call-arg]


def test_overrides_as_a_mapping() -> None:
    with pytest.raises(
        TypeError,
        match=r"overrides must be a list of strings such as \['fusion=off', 'model.num_layers=2'\], "
        r"got \{'fusion': 'off'\}; a name or a mapping may be the first argument$",
    ):
        build("gpt_nano", {"fusion": "off"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("module", "name", "text"),
    [
        (
            "components.nvfuser",
            "NVFusedBiasActivationDropout",
            "NVFusedBiasActivationDropout of xFormers is fuselayers.components.FusedBiasActivationDropout here",
        ),
        (
            "components",
            "build_feedforward",
            "build_feedforward of xFormers is "
            "fuselayers.components.create('feedforward', Choice(NAME, OPTIONS), WIDTH) here",
        ),
        (
            "ops",
            "memory_efficient_attention",
            "memory_efficient_attention of xFormers is "
            "torch.nn.functional.scaled_dot_product_attention, which multi_head calls here",
        ),
    ],
)
def test_an_import_of_xformers(module: str, name: str, text: str) -> None:
    with pytest.raises(ImportError, match=f"^{re.escape(text)}$"):
        exec(f"from fuselayers.{module} import {name}")


@pytest.mark.parametrize("scope", ["none", "model"])
def test_arguments_of_hugging_face(scope: str) -> None:
    small = ["model.num_layers=1", "model.hidden_dim=32", "fusion.backend=eager", f"fusion.scope={scope}"]
    model, tokens = build("gpt_nano", small), torch.zeros(1, 3, dtype=torch.int64)
    text = r"^no argument of Decoder.forward 'labels'; did you mean 'targets_BT'\? there are: "
    with pytest.raises(TypeError, match=text):
        model(tokens, labels=tokens)
    with pytest.raises(TypeError, match=r"^Decoder.forward\(\) missing 1 required positional argument: 'tokens_BT'$"):
        model()
    text = r"^no Decoder.generate argument 'max_new_tokens'; did you mean 'num_tokens'\? there are: "
    with pytest.raises(TypeError, match=text):
        model.generate(tokens, max_new_tokens=3)
