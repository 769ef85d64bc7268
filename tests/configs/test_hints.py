"""What an error says to somebody who writes the names of another library, or puts an option into another section."""

import re

import pytest
from torch import Tensor, nn

from fuselayers import build, components, fuse
from fuselayers.components import Choice, create, register, registry
from fuselayers.configs import compose
from fuselayers.partition import FusedModule


def _error(*overrides: str) -> str:
    with pytest.raises(ValueError, match="no ") as caught:
        compose("gpt_nano", overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("model.d_model=64", "no decoder option 'd_model'; did you mean 'hidden_dim'? there are: "),
        ("model.hidden_size=64", "no decoder option 'hidden_size'; did you mean 'hidden_dim'? "),
        ("model.n_layers=2", "no decoder option 'n_layers'; did you mean 'num_layers'? "),
        ("model.num_hidden_layers=2", "no decoder option 'num_hidden_layers'; did you mean 'num_layers'? "),
        ("model.embd_pdrop=0", "no decoder option 'embd_pdrop'; did you mean 'embedding_dropout'? "),
        ("model.lm_head_bias=true", "no decoder option 'lm_head_bias'; did you mean 'head_bias'? "),
        (
            "model.word_embeddings_layernorm=true",
            "no decoder option 'word_embeddings_layernorm'; did you mean 'embedding_norm'? ",
        ),
        ("residual=parallel_residual", "no residual 'parallel_residual'; did you mean 'parallel'? "),
        ("residual=gpt_neox", "no residual 'gpt_neox'; did you mean 'parallel' with separate_norms=true? "),
        ("model=pythia", "no model 'pythia'; did you mean 'pythia_160m'? "),
        ("model=gpt_neox", "no model 'gpt_neox'; did you mean 'gpt_neox_20b'? "),
        ("model.rotary_pct=0.5", "no decoder option 'rotary_pct'; "),
        ("model.block_size=8", "no decoder option 'block_size'; did you mean 'context_length'? "),
        ("attention.n_heads=2", "no multi_head option 'n_heads'; did you mean 'num_heads'? "),
        ("attention.dim_head=2", "no multi_head option 'dim_head'; did you mean 'head_dim'? "),
        ("feedforward.intermediate_size=2", "no fused_mlp option 'intermediate_size'; did you mean 'width'? "),
        ("feedforward.mlp_ratio=2", "no fused_mlp option 'mlp_ratio'; did you mean 'expansion'? "),
        ("norm.epsilon=0", "no layer_norm option 'epsilon'; did you mean 'eps'? "),
        ("train.lr=1", "no train option 'lr'; did you mean 'learning_rate'? "),
        ("model=gpt2", "no model 'gpt2'; did you mean 'gpt2_small'? "),
        ("model=GPT2", "no model 'GPT2'; did you mean 'gpt2_small'? "),
        ("feedforward=swiglu", "no feedforward 'swiglu'; did you mean 'gated_mlp'? "),
        ("feedforward=geglu", "no feedforward 'geglu'; did you mean 'gated_mlp' with activation=gelu? "),
        ("feedforward.activation=swish", "no activation 'swish'; did you mean 'silu'? "),
        ("norm=rmsnorm", "no norm 'rmsnorm'; did you mean 'rms_norm'? "),
        ("norm=identity", "no norm 'identity'; did you mean 'skip'? "),
        ("position=rope", "no position 'rope'; did you mean 'rotary'? "),
        ("attention=scaled_dot_product", "no attention 'scaled_dot_product'; did you mean 'multi_head'? "),
        ("residual=pre_norm", "no residual 'pre_norm'; did you mean 'pre'? "),
        ("attention.dim_features=8", "no multi_head option 'dim_features'; "),
        ("ffn=mlp", "no config group 'ffn'; did you mean 'feedforward'? "),
        ("normalization=layer_norm", "no config group 'normalization'; did you mean 'norm'? "),
        ("fusion=none", "no fusion 'none'; did you mean 'off'? "),
    ],
)
def test_another_librarys_name(override: str, text: str) -> None:
    assert _error(override).startswith(text)


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("num_layers=2", "no config group 'num_layers'; did you mean 'model.num_layers'? there are: attention, "),
        ("d_model=2", "no config group 'd_model'; did you mean 'model.hidden_dim'? "),
        ("lr=2", "no config group 'lr'; did you mean 'train.learning_rate'? "),
        (
            "dropout=0",
            "no config group 'dropout'; did you mean 'model.dropout' or 'feedforward.dropout' or 'attention.dropout'? ",
        ),
        ("model.n_heads=2", "no decoder option 'n_heads'; did you mean 'attention.num_heads'? "),
        ("model.num_heads=2", "no decoder option 'num_heads'; did you mean 'attention.num_heads'? "),
        ("model.intermediate_size=2", "no decoder option 'intermediate_size'; did you mean 'feedforward.width'? "),
        ("attention.hidden_dim=2", "no multi_head option 'hidden_dim'; did you mean 'model.hidden_dim'? "),
        ("feedforward.backend=eager", "no fused_mlp option 'backend'; did you mean 'fusion.backend'? "),
        ("train.path=x", "no train option 'path'; did you mean 'data.path'? "),
    ],
)
def test_an_option_of_another_section_is_named_with_its_path(override: str, text: str) -> None:
    assert _error(override).startswith(text)


def test_an_option_of_another_component_and_one_that_the_model_sets() -> None:
    assert _error("feedforward.num_experts=4").endswith("; mixture_of_experts has it")
    assert _error("attention.causal=true") == (
        "'causal' is no option of attention 'multi_head': the model sets it, a decoder to True; leave it out"
    )


@pytest.fixture
def _own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Components of a user: an option by position, an argument that nobody gives, an attention without `causal`."""
    for kind in ("feedforward", "attention"):
        monkeypatch.setitem(registry._OWNERS, kind, dict(registry._OWNERS[kind]))

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
        r"'times' of feedforward 'by_position' \(.*ByPosition\) is no option: only keyword-only arguments are; "
        r"write \* before it in __init__$"
    )
    assert re.match(text, _error("feedforward=by_position", "feedforward.times=2"))
    with pytest.raises(ValueError, match=text):
        create("feedforward", Choice("by_position", {"times": 2}), 8)
    with pytest.raises(
        TypeError,
        match=r"feedforward 'needs_more' \(.*NeedsMore\) cannot be built: missing a required argument: 'times'; "
        r"a builder gives the sizes of its kind by position, and what a config sets must be keyword-only, after \* in",
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
        TypeError, match=r"^FusedMLP: too many positional arguments; it takes hidden_dim, and by name expansion, width"
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
        r"got the mapping \{'fusion': 'off'\}; a mapping may be the first argument$",
    ):
        build("gpt_nano", {"fusion": "off"})  # type: ignore[arg-type]


def test_the_class_of_a_built_model() -> None:
    small = ["model.num_layers=1", "model.hidden_dim=8", "attention.num_heads=2"]
    fused = build("gpt_nano", small)
    assert isinstance(fused, components.Decoder)
    assert isinstance(fused.blocks[0], FusedModule)
    assert isinstance(build("gpt_nano", [*small, "fusion=off"]), components.Decoder)


def test_a_class_is_not_fused() -> None:
    text = "fuse takes a function or a module, got the class Linear; fuse an instance of it"
    with pytest.raises(TypeError, match=text):
        fuse(nn.Linear)
