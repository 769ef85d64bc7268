from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra import initialize_config_dir, version
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import Container, OmegaConf
from torch import nn

from fuselayers.components import REQUIRED, Choice, Encoder, options, registry
from fuselayers.configs import Config, FusionConfig, choices, compose
from fuselayers.configs.group_files import COMPONENT_GROUPS, SHIPPED, composed_files

# What the names of models begin with -> model, feedforward, norm, residual style and position.
ARCHITECTURES = {
    "gpt2": ("decoder", "fused_mlp", "layer_norm", "pre", "learned"),
    "gpt_nano": ("decoder", "fused_mlp", "layer_norm", "pre", "learned"),
    "bert": ("encoder", "fused_mlp", "layer_norm", "post", "learned"),
    "llama": ("decoder", "gated_mlp", "rms_norm", "pre", "rotary"),
    "mistral": ("decoder", "gated_mlp", "rms_norm", "pre", "rotary"),
    "mixtral": ("decoder", "mixture_of_experts", "rms_norm", "pre", "rotary"),
    "gemma2": ("decoder", "gated_mlp", "rms_norm", "sandwich", "rotary"),
    "qwen2": ("decoder", "gated_mlp", "rms_norm", "pre", "rotary"),
    "qwen3": ("decoder", "gated_mlp", "rms_norm", "pre", "rotary"),
    "opt": ("decoder", "fused_mlp", "layer_norm", "pre", "learned"),
    "gpt_neox": ("decoder", "fused_mlp", "layer_norm", "parallel", "rotary"),
    "pythia": ("decoder", "fused_mlp", "layer_norm", "parallel", "rotary"),
    "phi": ("decoder", "fused_mlp", "layer_norm", "parallel", "rotary"),
    "bloom": ("decoder", "fused_mlp", "layer_norm", "pre", "alibi"),
    "hierarchical_vision": ("hierarchical_vision", "fused_mlp", "layer_norm", "pre", "learned"),
    "vit": ("vision_transformer", "fused_mlp", "layer_norm", "pre", "learned"),
    "t5": ("encoder_decoder", "fused_mlp", "rms_norm", "pre", "relative"),
}
PARTS = {
    model: next(parts for start, parts in ARCHITECTURES.items() if model.startswith(start))
    for model in choices("model")
}


def parts(config: Config) -> tuple[str, ...]:
    assert config.attention.name == "multi_head"
    return tuple(getattr(config, kind).name for kind in ("model", "feedforward", "norm", "residual", "position"))


def rotary(base: float) -> Choice:
    defaults = {option.name: option.default for option in options("position", "rotary")}
    return Choice("rotary", {**defaults, "base": base})


@pytest.mark.parametrize("model", PARTS)
def test_a_shipped_model_composes_to_its_own_parts(model: str) -> None:
    assert parts(compose(model)) == PARTS[model]
    assert parts(compose(overrides=[f"model={model}"])) == PARTS[model]


@pytest.mark.parametrize("model", PARTS)
def test_a_shipped_model_sets_only_what_its_own_parts_know(model: str) -> None:
    sections = composed_files({"model": model}, (SHIPPED,))
    for kind in ("model", *COMPONENT_GROUPS):
        known = {option.name for option in options(kind, sections[kind]["name"])}
        assert set(sections[kind]) - {"name"} <= known


@pytest.mark.parametrize("model", PARTS)
def test_every_option_is_in_the_config(model: str) -> None:
    config = compose(model)
    for kind in ("model", *COMPONENT_GROUPS):
        choice: Choice = getattr(config, kind)
        assert list(choice.options) == [option.name for option in options(kind, choice.name)]
        assert REQUIRED not in choice.options.values()


def test_published_numbers() -> None:
    gpt2 = compose("gpt2_small")
    assert gpt2.model.options["dropout"] == 0.1
    assert gpt2.feedforward.options["activation"] == "gelu_tanh"
    assert gpt2.norm.options["eps"] == 1e-5
    bert = compose("bert_base")
    assert bert.norm.options["eps"] == 1e-12
    assert bert.attention.options["dropout"] == 0.1
    assert bert.feedforward.options["activation"] == "gelu"
    assert bert.residual.name == "post"
    llama = compose("llama_tiny")
    assert llama.position == rotary(10000.0)
    assert llama.attention.options["num_kv_heads"] < llama.attention.options["num_heads"]
    assert not llama.attention.options["bias"]
    assert not llama.feedforward.options["bias"]


@pytest.mark.parametrize("model", PARTS)
def test_a_choice_wins_over_the_models_own_wherever_it_stands(model: str) -> None:
    asked = [f"model={model}", "feedforward=mlp", "norm=rms_norm", "feedforward.expansion=3", "train.steps=7"]
    config = compose(overrides=asked)
    assert parts(config) == (PARTS[model][0], "mlp", "rms_norm", *PARTS[model][3:])
    assert config.feedforward.options["expansion"] == 3.0
    assert config.train.steps == 7
    assert compose(overrides=asked[::-1]) == config
    assert compose(model, asked[3:] + asked[:3]) == config


def test_choices_come_before_options_and_the_last_of_a_path_wins() -> None:
    asked = ["position.base=500", "position=rotary", "position=alibi", "position=rotary", "position.base=600"]
    assert compose(overrides=asked).position == rotary(600.0)
    assert compose("llama_tiny", ["position.base=7"]).position == rotary(7.0)
    assert compose(overrides=["position={name: rotary, base: 500}", "position.base=6"]).position == rotary(6.0)
    assert compose(overrides=["train.steps=6", "train={steps: 7}"]).train.steps == 7
    assert compose(overrides=["model=bert_base", "model=llama_tiny"]) == compose("llama_tiny")
    assert compose({"train": "quick"}, ["train=default"]).train == compose().train


def test_a_component_within_the_model_is_chosen_and_set_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(nn.Module):
        def __init__(self, hidden_dim: int, *, width: int = 3) -> None:
            super().__init__()

    monkeypatch.setitem(registry._OWNERS["block"], "other", Other)
    for order in itertools.permutations(["model.block=other", "model.block.width=5"]):
        assert compose(overrides=list(order)).model.options["block"] == Choice("other", {"width": 5})
    assert compose(overrides=["model.block={name: other}"]).model.options["block"] == Choice("other", {"width": 3})


def test_a_swap_keeps_every_option_that_was_written_and_says_what_else_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = {"feedforward": {"name": "fused_mlp", "dropout": 0.3, "expansion": 4.0, "bias": True}}
    swapped = compose(source, ["feedforward=gated_mlp"]).feedforward
    assert swapped.options == {
        "expansion": 4.0,
        "multiple_of": 1,
        "activation": "silu",
        "bias": True,
        "dropout": 0.3,
        "width": None,
        "packed": False,
    }
    source = {"feedforward": {"name": "gated_mlp", "multiple_of": 8}, "norm": {"name": "rms_norm", "eps": 0.5}}
    compose(source, ["feedforward=mlp", "feedforward.bias=true", "norm=layer_norm", "model.block=reversible"])
    compose({**source, "train": {"seed": 5}}, ["model=llama_tiny", "train=quick"])
    compose(compose(), ["train=quick", "fusion=off"])
    compose(source, ["feedforward=gated_mlp"])
    compose({"feedforward": "mlp"}, ["feedforward=fused_mlp"])
    assert [record.getMessage() for record in caplog.records] == [
        "feedforward=gated_mlp replaces fused_mlp: by default activation='silu' (was 'gelu')",
        "feedforward=mlp replaces gated_mlp: by default expansion=4.0 (was 2.6666666666666665), activation='gelu' "
        "(was 'silu'); dropped multiple_of=8, which mlp does not have",
        "model=llama_tiny, train=quick replaces train, feedforward, norm of the config",
    ]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_a_swap_in_a_shipped_model_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "fuselayers")
    llama = compose("llama_tiny", ["feedforward=mlp", "feedforward.expansion=3", "norm=layer_norm"])
    assert llama.attention == compose("llama_tiny").attention
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.getMessage() == (
        "feedforward=mlp replaces gated_mlp: by default activation='gelu' (was 'silu'), bias=True (was False); "
        "dropped multiple_of=32, which mlp does not have; "
        "norm=layer_norm replaces rms_norm: by default eps=1e-05 (was 1e-06)"
    )


def test_a_swap_to_mlp_and_its_fused_twin_changes_the_name_alone() -> None:
    plain, fused = compose(overrides=["feedforward=mlp"]), compose(overrides=["feedforward=fused_mlp"])
    assert plain == replace(fused, feedforward=Choice("mlp", fused.feedforward.options))
    assert fused.feedforward.options["dropout"] == fused.model.options["dropout"] > 0


def test_a_reference_follows_what_it_names() -> None:
    config = compose("gpt_nano", ["model.dropout=0.25"])
    assert config.feedforward.options["dropout"] == 0.25
    config = compose({"train": {"evaluate_every": "${train.checkpoint_every}"}}, ["train.checkpoint_every=17"])
    assert config.train.evaluate_every == 17


@pytest.mark.parametrize(
    ("fusion", "expected"),
    [
        ("auto", FusionConfig("auto", "min_cut", "model")),
        ("off", FusionConfig("eager", "min_cut", "none")),
        ("eager", FusionConfig("eager", "min_cut", "model")),
        ("inductor", FusionConfig("inductor", "min_cut", "model")),
    ],
)
def test_fusion_choices(fusion: str, expected: FusionConfig) -> None:
    assert compose(overrides=[f"fusion={fusion}"]).fusion == expected
    assert compose({"fusion": fusion}).fusion == expected


def test_train_and_data_choices(tmp_path: Path) -> None:
    quick, full = compose(overrides=["train=quick"]).train, compose().train
    assert quick.steps < full.steps
    assert quick.learning_rate == full.learning_rate
    data = compose(overrides=["data=text", f"data.path={tmp_path}"]).data
    assert data.path == str(tmp_path)
    assert data.suffixes == ()
    assert compose(overrides=["data.suffixes=[.c,.h]"]).data.suffixes == (".c", ".h")


class TestSources:
    def test_a_file_a_mapping_and_overrides_say_the_same(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text(
            "defaults:\n  - model: llama_tiny\n  - override /fusion: off\n  - _self_\n"
            "feedforward: mlp\nmodel: {num_layers: 2}\ntrain:\n  learning_rate: 5e-3\n"
        )
        mapping = {
            "defaults": [{"model": "llama_tiny"}],
            "fusion": "off",
            "feedforward": {"name": "mlp"},
            "model": {"num_layers": 2},
            "train": {"learning_rate": 5e-3},
        }
        asked = ["model=llama_tiny", "fusion=off", "feedforward=mlp", "model.num_layers=2", "train.learning_rate=5e-3"]
        expected = compose(overrides=asked)
        assert expected.model.options["num_layers"] == 2
        assert compose(path) == compose(str(path)) == compose(mapping) == compose(OmegaConf.create(mapping)) == expected

    def test_a_choice_object_in_a_mapping(self) -> None:
        assert compose({"feedforward": Choice("mlp", {"expansion": 2})}).feedforward.options["expansion"] == 2.0

    def test_a_config_is_a_source(self) -> None:
        config = compose("llama_tiny", ["train.steps=3"])
        assert compose(config) == config
        assert compose({}) == compose()
        assert compose(config, ["train.steps=4"]) == replace(config, train=replace(config.train, steps=4))

    def test_overrides_win_over_a_file_and_a_file_over_its_model(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("model: llama_tiny\nfeedforward: {expansion: 3, multiple_of: 8}\ntrain: {steps: 5, seed: 6}\n")
        config = compose(path, ["train.steps=50"])
        assert (config.feedforward.name, config.feedforward.options["multiple_of"]) == ("gated_mlp", 8)
        assert (config.train.steps, config.train.seed) == (50, 6)
        swapped = compose(path, ["feedforward=mlp"]).feedforward
        assert (swapped.name, swapped.options["expansion"]) == ("mlp", 3.0)

    def test_a_preset_chosen_on_top_of_a_file_replaces_its_section(self, tmp_path: Path) -> None:
        source = {"train": {"seed": 6}, "fusion": {"scope": "layer"}}
        config = compose(source, ["train=quick", "train.steps=3"])
        assert config.train == replace(compose(overrides=["train=quick"]).train, steps=3)
        assert config.fusion.scope == "layer"

    @pytest.mark.parametrize(
        ("source", "error", "text"),
        [
            (5, TypeError, "the name of a shipped model, the path of a .yaml file or a mapping, got a int"),
            (None, TypeError, "the name of a shipped model, the path of a .yaml file or a mapping, got a NoneType"),
            (
                "nowhere/x.yaml",
                FileNotFoundError,
                "cannot read the config file nowhere/x.yaml: No such file or directory",
            ),
            (
                "gpt_nan",
                ValueError,
                "no model 'gpt_nan'; did you mean 'gpt_nano'? there are: bert_base, ",
            ),
            ({"train": None}, ValueError, "train must be the name of a choice or a mapping of options, got nothing"),
            ({"defaults": "gpt_nano"}, ValueError, "defaults must be a list of group: choice, got a str"),
            ({"defaults": ["gpt_nano"]}, ValueError, "an entry of defaults must be group: choice, got 'gpt_nano'"),
            ({"defaults": [{"model": None}]}, ValueError, "an entry of defaults must be group: choice, got"),
        ],
    )
    def test_errors(self, source: Any, error: type[Exception], text: str) -> None:
        with pytest.raises(error) as caught:
            compose(source)
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["feedforwrd=mlp"],
            "no config group 'feedforwrd'; did you mean 'feedforward'? there are: "
            "attention, data, feedforward, fusion, model, norm, parallel, position, residual, train",
        ),
        (["feedforwrd.expansion=2"], "no config group 'feedforwrd'; did you mean 'feedforward'?"),
        (
            ["feedforward=mpl"],
            "no feedforward 'mpl'; did you mean 'mlp'? there are: conv_mlp, fused_mlp, gated_mlp, mixture_of_experts, "
            "mlp",
        ),
        (["feedforward.name=mpl"], "no feedforward 'mpl'; did you mean 'mlp'?"),
        (["train=defualt"], "no train 'defualt'; did you mean 'default'? there are: default, quick"),
        (["fusion=of"], "no fusion 'of'; did you mean 'off'? there are: auto, eager, inductor, nvfuser, off, triton"),
        (
            ["feedforward.expansoin=2"],
            "no fused_mlp option 'expansoin'; did you mean 'expansion'? "
            "there are: activation, bias, dropout, expansion",
        ),
        (["feedforward=mlp", "feedforward.multiple_of=2"], "no mlp option 'multiple_of'; there are: activation, bias"),
        (
            ["feedforward.backend=eager"],
            "no fused_mlp option 'backend'; did you mean 'fusion.backend'?",
        ),
        (["model.hidden_dims=8"], "no decoder option 'hidden_dims'; did you mean 'hidden_dim'?"),
        (
            ["position=rotry"],
            "no position 'rotry'; did you mean 'rotary'? there are: alibi, learned, none, relative, rotary, sinusoidal",
        ),
        (["position.base=5"], "no learned option 'base'; there are none"),
        (["position=rotary", "position.bse=5"], "no rotary option 'bse'; did you mean 'base'?"),
        (["train.step=1"], "no train option 'step'; did you mean 'steps'? there are: accumulate"),
        (["fusion.scop=model"], "no fusion option 'scop'; did you mean 'scope'? there are: backend, partition, scope"),
        (["feedforward.expansion=four"], "feedforward.expansion must be a number, got 'four'"),
        (["feedforward.expansion=true"], "feedforward.expansion must be a number, got True"),
        (["feedforward.expansion=inf"], "feedforward.expansion must be a number, got inf"),
        (["feedforward.bias=1"], "feedforward.bias must be true or false, got 1"),
        (["feedforward.activation=gelo"], "no activation 'gelo'; did you mean 'gelu'?"),
        (["feedforward.activation=3"], "feedforward.activation must be text or null, got 3"),
        (["attention.num_kv_heads=two"], "attention.num_kv_heads must be a whole number or null, got 'two'"),
        (["model.hidden_dim=128.5"], "model.hidden_dim must be a whole number, got 128.5"),
        (["position=5"], "position must be the name of a choice or a mapping of options, got a int"),
        (["model.block=5"], "model.block must be a name or a mapping of options, got 5"),
        (["position.base=x", "position=rotary"], "position.base must be a number, got 'x'"),
        (
            ["feedforward.name=[a]"],
            "feedforward must name a feedforward, got ['a']; there are: conv_mlp, fused_mlp, gated_mlp, "
            "mixture_of_experts, mlp",
        ),
        (["model.name=bert_base"], "'bert_base' is a file; choose it with model=bert_base"),
        (["train.steps=0"], "train.steps must be at least 1, got 0"),
        (["train.beta1=1"], "train.beta1 must be at least 0 and below 1, got 1.0"),
        (["train.learning_rate=0"], "train.learning_rate must be above 0, got 0.0"),
        (["data.held_out=1.5"], "data.held_out must be above 0 and below 1, got 1.5"),
        (["train.precision=fp16"], "no train.precision 'fp16'; there are: bfloat16, float32"),
        (["fusion.scope=blok"], "no fusion.scope 'blok'; did you mean 'block'? there are: block, layer, model, none"),
        (["fusion.backend=nvfuse"], "no backend 'nvfuse'; did you mean 'nvfuser'?"),
        (
            ["fusion.backend=null"],
            "fusion.backend must be a name, got null; leave it out, or write auto",
        ),
        (["fusion.partition=mincut"], "no partitioner 'mincut'; did you mean 'min_cut'?"),
        (["data=text"], "data.path has no value yet; set data.path="),
        (["data.suffixes=.py"], "data.suffixes must be a list, got '.py'; write [.py]"),
        (["train.min_learning_rate=1"], "train.min_learning_rate must be at most train.learning_rate"),
        (
            ["feedforward.dropout=${model.dropuot}"],
            "feedforward.dropout refers to ${model.dropuot}, which this config does not have",
        ),
        (["attention.dropout=${model.block}"], "refers to ${model.block}, which is no single value"),
        (
            ["attention.dropout=${feedforward.dropout}", "feedforward.dropout=${attention.dropout}"],
            "feedforward.dropout refers to itself, through ${attention.dropout} -> ${feedforward.dropout}; give it a",
        ),
    ],
)
def test_errors(overrides: list[str], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        compose(overrides=overrides)
    assert text in str(caught.value)


def test_a_registered_model_with_the_name_of_a_file_is_that_model(monkeypatch: pytest.MonkeyPatch) -> None:
    # As where a package registers a model that a later release of ours ships a file of.
    monkeypatch.setitem(registry._OWNERS["model"], "bert_base", Encoder)
    asked = compose("bert_tiny", ["model.name=bert_base"])
    assert asked.model == Choice("bert_base", compose("bert_tiny").model.options)
    assert compose(asked) == asked


def test_a_required_option_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wide(nn.Module):
        """Wide.

        Args:
            width: how wide it is.
        """

        def __init__(self, hidden_dim: int, *, width: int) -> None:
            super().__init__()

    monkeypatch.setitem(registry._OWNERS["feedforward"], "wide", Wide)
    with pytest.raises(ValueError, match=r"feedforward 'wide' needs the option 'width' \(how wide it is\.\)"):
        compose(overrides=["feedforward=wide"])
    assert compose(overrides=["feedforward=wide", "feedforward.width=3"]).feedforward == Choice("wide", {"width": 3})


def test_the_callers_mapping_is_not_changed_nor_kept() -> None:
    source: dict[str, Any] = {
        "defaults": [{"model": "llama_tiny"}],
        "position": {"name": "rotary", "base": 5.0},
        "data": {"suffixes": [".c"]},
    }
    before = copy.deepcopy(source)
    config = compose(source, ["position.base=7", "feedforward=mlp"])
    assert source == before
    source["position"]["base"] = 9.0
    source["data"]["suffixes"].append(".h")
    assert config.position == rotary(7.0)
    assert config.data.suffixes == (".c",)


def every_value(value: Any) -> Iterator[Any]:
    yield value
    for part in vars(value).values() if hasattr(value, "__dataclass_fields__") else ():
        yield from every_value(part)
    if isinstance(value, (dict, list, tuple)):
        for part in value.values() if isinstance(value, dict) else value:
            yield from every_value(part)


def test_nothing_of_omegaconf_is_left_and_a_config_can_be_copied_and_pickled() -> None:
    config = compose(OmegaConf.create({"position": "rotary", "data": {"suffixes": [".c"]}}))
    values = list(every_value(replace(config, left_at_default=frozenset())))
    assert {type(path) for path in config.left_at_default} == {str}
    assert ".c" in values
    assert 10000.0 in values
    assert not any(isinstance(value, Container) for value in values)
    assert {type(value) for value in values if "fuselayers" not in type(value).__module__} <= {
        *(dict, tuple, str, int, float, bool, type(None), frozenset)
    }
    assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))


@pytest.fixture
def outer_application(tmp_path: Path) -> Iterator[Path]:
    """Somebody's Hydra application, whose files and nodes have the names of ours."""
    (tmp_path / "feedforward").mkdir()
    (tmp_path / "theirs.yaml").write_text("defaults: [{feedforward: mlp}, _self_]\nmine: 1\n")
    (tmp_path / "feedforward" / "mlp.yaml").write_text("name: theirs\n")
    store = ConfigStore.instance()
    before = copy.deepcopy(store.repo)
    store.store(name="config", node={"stored": 1})
    store.store(group="train", name="default", node={"stored": 1})
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        yield tmp_path
    store.repo = before


def test_it_works_inside_another_hydra_application(outer_application: Path) -> None:
    singleton, outer = GlobalHydra.instance(), GlobalHydra.instance().hydra
    assert outer is not None
    config = compose("llama_tiny", ["feedforward=mlp"])
    assert config.feedforward.name == "mlp"
    assert GlobalHydra.instance() is singleton
    assert GlobalHydra.instance().hydra is outer
    assert str(version.getbase()) == "1.3"
    theirs = hydra.compose("theirs")
    assert theirs.mine == 1
    assert theirs.feedforward.name == "theirs"


def test_threads_compose_at_the_same_time(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number in range(4):
        (tmp_path / "train" / f"mine_{number}.yaml").write_text(f"defaults: [default]\nseed: {number}\n")
    asked = [[f"hydra.searchpath=[{tmp_path}]", f"train=mine_{number % 4}"] for number in range(12)]
    with ThreadPoolExecutor(6) as threads:
        configs = list(threads.map(lambda overrides: compose(overrides=overrides), asked))
    assert [config.train.seed for config in configs] == [0, 1, 2, 3] * 3


def test_it_initialises_no_hydra_application() -> None:
    GlobalHydra.instance().clear()
    compose("gpt_nano", ["feedforward=mlp", "train=quick"])
    assert not GlobalHydra.instance().is_initialized()


def test_it_draws_nothing_from_torchs_generator() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    compose()
    assert torch.equal(torch.rand(3), expected)


def test_another_model_over_a_saved_config_brings_its_own_parts() -> None:
    saved = compose("gpt_nano", ["feedforward=mlp", "attention.num_heads=2"])
    assert compose(saved, ["model=llama_tiny"]) == compose("llama_tiny")
    both = {"defaults": [{"feedforward": "mlp"}], "feedforward": {"bias": False}}
    assert compose(both, ["model=llama_tiny"]) == compose("llama_tiny")
