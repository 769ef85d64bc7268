import copy
import itertools
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
import pytest
from hydra import initialize_config_dir, version
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from torch import nn

from fuselayers.components import Choice, options, register
from fuselayers.configs import compose


def rotary(base: float) -> Choice:
    defaults = {option.name: option.default for option in options("position", "rotary")}
    return Choice("rotary", {**defaults, "base": base})


def test_choices_come_before_options_and_the_last_of_a_path_wins() -> None:
    asked = ["position.base=500", "position=rotary", "position=alibi", "position=rotary", "position.base=600"]
    assert compose(overrides=asked).position == rotary(600.0)
    assert compose("llama_tiny", ["position.base=7"]).position == rotary(7.0)
    assert compose(overrides=["position={name: rotary, base: 500}", "position.base=6"]).position == rotary(6.0)
    assert compose(overrides=["train.steps=6", "train={steps: 7}"]).train.steps == 7
    assert compose(overrides=["model=bert_base", "model=llama_tiny"]) == compose("llama_tiny")
    assert compose({"train": "quick"}, ["train=default"]).train == compose().train


def test_a_choice_wins_over_the_models_own_wherever_it_stands() -> None:
    asked = ["model=llama_tiny", "feedforward=mlp", "norm=layer_norm", "feedforward.expansion=3", "train.steps=7"]
    config = compose(overrides=asked)
    assert (config.model.name, config.feedforward.name, config.norm.name) == ("decoder", "mlp", "layer_norm")
    assert (config.feedforward.options["expansion"], config.train.steps) == (3.0, 7)
    assert compose(overrides=asked[::-1]) == config
    assert compose("llama_tiny", asked[3:] + asked[1:3]) == config


def test_a_component_within_a_component_is_chosen_and_set_in_any_order() -> None:
    mixture = ["feedforward=mixture_of_experts", "feedforward.expert=gated_mlp", "feedforward.expert.multiple_of=5"]
    for order in itertools.permutations(mixture):
        expert = compose(overrides=list(order)).feedforward.options["expert"]
        assert (expert.name, expert.options["multiple_of"]) == ("gated_mlp", 5)
    named = compose(overrides=[mixture[0], "feedforward.expert={name: gated_mlp}"]).feedforward.options["expert"]
    assert named.options["multiple_of"] == 1


def test_a_swap_keeps_what_differs_from_a_default_and_says_what_else_changes(caplog: pytest.LogCaptureFixture) -> None:
    source = {"feedforward": {"name": "fused_mlp", "dropout": 0.3, "expansion": 3.0, "bias": True}}
    swapped = compose(source, ["feedforward=gated_mlp"]).feedforward.options
    assert (swapped["dropout"], swapped["expansion"]) == (0.3, 3.0)
    # Options at fused_mlp's defaults take gated_mlp's defaults.
    assert (swapped["bias"], swapped["activation"]) == (False, "silu")
    source = {"feedforward": {"name": "gated_mlp", "multiple_of": 8}, "norm": {"name": "rms_norm", "eps": 0.5}}
    compose(source, ["feedforward=mlp", "feedforward.bias=true", "norm=layer_norm", "model.block=reversible"])
    compose({**source, "train": {"seed": 5}}, ["model=llama_tiny", "train=quick"])
    compose(compose(), ["train=quick", "fusion=off"])
    compose(source, ["feedforward=gated_mlp"])
    compose({"feedforward": "mlp"}, ["feedforward=fused_mlp"])
    assert [record.getMessage() for record in caplog.records] == [
        "feedforward=gated_mlp replaces fused_mlp: by default activation='silu' (was 'gelu'), bias=False (was True)",
        "feedforward=mlp replaces gated_mlp: by default expansion=4 (was 2.667), activation='gelu' "
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


def test_a_reference_follows_what_it_names() -> None:
    config = compose("gpt_nano", ["model.dropout=0.25"])
    assert config.feedforward.options["dropout"] == 0.25
    config = compose({"train": {"evaluate_every": "${train.checkpoint_every}"}}, ["train.checkpoint_every=17"])
    assert config.train.evaluate_every == 17


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
        with pytest.raises(error, match=re.escape(text)):
            compose(source)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["feedforwrd=mlp"],
            "no config group 'feedforwrd'; did you mean 'feedforward'? there are: "
            "attention, data, feedforward, fusion, model, norm, parallel, position, residual, train",
        ),
        (
            ["feedforward=mpl"],
            "no feedforward 'mpl'; did you mean 'mlp'? there are: conv_mlp, fused_mlp, gated_mlp, mixture_of_experts, "
            "mlp",
        ),
        (
            ["feedforward.expansoin=2"],
            "no fused_mlp option 'expansoin'; did you mean 'expansion'? "
            "there are: activation, bias, dropout, expansion",
        ),
        (["position.base=5"], "no learned option 'base'; there are none"),
        (["fusion.scop=model"], "no fusion option 'scop'; did you mean 'scope'? there are: backend, compress, parti"),
        (["fusion.compress=int4"], "no compression 'int4'; did you mean 'int8'? there are: bfloat16, float8, int8"),
        (["feedforward.expansion=four"], "feedforward.expansion must be a number, got 'four'"),
        (["feedforward.expansion=inf"], "feedforward.expansion must be above 0 and finite, got inf"),
        (["feedforward.bias=1"], "feedforward.bias must be true or false, got 1"),
        (["feedforward.activation=3"], "feedforward.activation must be text or null, got 3"),
        (["model.hidden_dim=128.5"], "model.hidden_dim must be a whole number, got 128.5"),
        (["position=5"], "position must be the name of a choice or a mapping of options, got a int"),
        (["position.base=x", "position=rotary"], "position.base must be a number, got 'x'"),
        (
            ["feedforward.name=[a]"],
            "feedforward must name a feedforward, got ['a']; there are: conv_mlp, fused_mlp, gated_mlp, "
            "mixture_of_experts, mlp",
        ),
        (["model.name=bert_base"], "'bert_base' is a file; choose it with model=bert_base"),
        (["train.precision=fp16"], "no train.precision 'fp16'; there are: bfloat16, float32"),
        (["fusion.backend=null"], "fusion.backend must be text, got None"),
        (["fusion.partition=mincut"], "no partitioner 'mincut'; did you mean 'min_cut'?"),
        (
            ["data=text"],
            "data needs the option 'path' (a text file or a folder; \"\" is the source of Python's standard library); "
            "set data.path=",
        ),
        (["data.suffixes=.py"], "data.suffixes must be a list, got '.py'; write [.py]"),
        # A case for each kind of range and type, and each rule between fields.
        (["train.steps=0"], "train.steps must be at least 1, got 0"),
        (["train.beta2=1.0"], "train.beta2 must be at least 0 and below 1, got 1.0"),
        ([f"train.seed={2**63}"], "train.seed must be below 2**63, got 9223372036854775808"),
        (["train.device='gpu 1'"], "train.device must be auto (a GPU where there is one), cpu, or one GPU, such as cu"),
        (
            ["train.min_learning_rate=1"],
            "train.min_learning_rate must be at most train.learning_rate, 0.004, got 1.0; lower it too",
        ),
        (["data.held_out=1.0"], "data.held_out must be above 0 and below 1, got 1.0"),
        (["fusion.scope=modle"], "no fusion.scope 'modle'; did you mean 'model'? there are: block, model"),
        (
            ["parallel.checkpointing=blok"],
            "no parallel.checkpointing 'blok'; did you mean 'block'? there are: block, budget:0.5, none, selective",
        ),
        (
            ["parallel.sequence=true"],
            "parallel.sequence splits the tokens over a tensor-parallel group, but parallel.tp is 1; set parallel.tp=2",
        ),
        (
            ["feedforward.dropout=${model.dropuot}"],
            "feedforward.dropout refers to ${model.dropuot}, which this config does not have",
        ),
        (["attention.dropout=${model.block}"], "refers to ${model.block}, which is not a single value"),
        (
            ["attention.dropout=${feedforward.dropout}", "feedforward.dropout=${attention.dropout}"],
            "feedforward.dropout refers to itself, through ${attention.dropout}; give it a value",
        ),
    ],
)
def test_errors(overrides: list[str], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        compose(overrides=overrides)


@pytest.mark.usefixtures("own_components")
def test_a_required_option_that_nobody_sets() -> None:
    @register("feedforward", "wide")
    class Wide(nn.Module):
        """Wide.

        Args:
            width: how wide it is.
        """

        def __init__(self, hidden_dim: int, *, width: int) -> None:
            super().__init__()

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


@pytest.fixture
def outer_application(tmp_path: Path) -> Iterator[Path]:
    """Another Hydra application, whose files and nodes have the names of ours."""
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


def test_another_model_over_a_saved_config_brings_its_own_parts() -> None:
    saved = compose("gpt_nano", ["feedforward=mlp", "attention.num_heads=2"])
    assert compose(saved, ["model=llama_tiny"]) == compose("llama_tiny")
    both = {"defaults": [{"feedforward": "mlp"}], "feedforward": {"bias": False}}
    assert compose(both, ["model=llama_tiny"]) == compose("llama_tiny")
