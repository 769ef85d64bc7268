"""The groups, and a user's folders in `hydra.searchpath`: their files, their precedence, and what is refused."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import torch
from hydra import initialize_config_module

from fuselayers.components import RMSNorm, names, register
from fuselayers.configs import COMPONENT_GROUPS, build, choices, compose

Write = Callable[[dict[str, str]], Path]

MINE = """\
# @package _global_
# A Llama of my own.
defaults:
  - llama_tiny
  - override /norm: layer_norm
  - override /residual: sandwich
  - override /feedforward: wide
model:
  num_layers: 2
residual:
  stochastic_depth: 0.1
"""
FILES = {
    "model/mine.yaml": MINE,
    "model/ours.yaml": "# @package _global_\ndefaults: [mine, override /feedforward: mlp]\nmodel: {hidden_dim: 64}\n",
    "model/narrow.yaml": "defaults: [gpt_nano]\nhidden_dim: 32\n",
    "feedforward/wide.yaml": "defaults: [gated_mlp]\nexpansion: 6\nmultiple_of: 8\n",
    "train/long.yaml": "defaults: [default]\nsteps: 9000\n",
    "fusion/mine.yaml": "backend: eager\npartition: default\nscope: block\n",
    "notes.yaml": "!!python/name:os.system ''\n",
    "src/anything.yaml": "!!python/name:os.system ''\n",
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(files: dict[str, str]) -> Path:
        folder = tmp_path / "my configs"
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        return folder

    return written


def test_every_component_has_a_file_for_hydra_applications() -> None:
    # One name of each group at a time.
    with initialize_config_module("fuselayers.configs.groups", version_base="1.3"):
        for row in itertools.zip_longest(*map(names, COMPONENT_GROUPS)):
            chosen = {group: name for group, name in zip(COMPONENT_GROUPS, row, strict=True) if name is not None}
            config = hydra.compose("config", [f"{group}={name}" for group, name in chosen.items()])
            assert {group: config[group].name for group in chosen} == chosen


def test_an_unknown_group_has_no_choices() -> None:
    with pytest.raises(
        ValueError, match=r"^no config group 'models'; did you mean 'model'\? there are: attention, data"
    ):
        choices("models")


@pytest.mark.usefixtures("own_components")
def test_a_component_that_a_user_registers_is_a_choice_without_a_file() -> None:
    @register("feedforward", "doubled")
    class Doubled(torch.nn.Module):
        def __init__(self, hidden_dim: int, *, times: float = 2.0, dropout: float = 0.0) -> None:
            super().__init__()
            self.times = times
            self.dropout = dropout

    assert "doubled" in choices("feedforward")
    config = compose(overrides=["feedforward=doubled", "feedforward.times=3"])
    assert config.feedforward.options == {"times": 3.0, "dropout": config.model.options["dropout"]}
    layer = build(config, ["fusion=off", "model.num_layers=1"]).blocks[0].feedforward  # type: ignore[index, union-attr]
    assert (type(layer), layer.times) == (Doubled, 3.0)


def searchpath(*folders: Path | str) -> str:
    return f"hydra.searchpath=[{','.join(map(str, folders))}]"


def test_user_files_extend_shipped_files(write: Write) -> None:
    path = searchpath(write(FILES))
    config = compose(overrides=[path, "model=mine"])
    expected = compose("llama_tiny", ["norm=layer_norm", "residual=sandwich", "residual.stochastic_depth=0.1"])
    assert (config.norm, config.residual, config.position) == (expected.norm, expected.residual, expected.position)
    assert config.model.options == {**expected.model.options, "num_layers": 2}
    # expansion is from wide. llama_tiny sets multiple_of too, and a model's file wins over those of its components.
    assert config.feedforward.options == {**expected.feedforward.options, "expansion": 6.0}
    assert config.train == expected.train
    longer = replace(config.train, steps=9000)
    assert compose("mine", [path, "train=long"]) == replace(config, train=longer)
    assert compose("mine", [path]) == compose({"model": "mine"}, [path]) == config


def test_an_option_of_a_file_stays_where_another_file_or_an_override_chooses(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    base = "# @package _global_\ndefaults: [llama_tiny]\nfeedforward: {expansion: 4}\n"
    plain = "# @package _global_\ndefaults: [base, override /feedforward: mlp]\n"
    path = searchpath(write({"model/base.yaml": base, "model/plain.yaml": plain}))
    by_file, by_override = compose("plain", [path]), compose("base", [path, "feedforward=mlp"])
    assert by_file == by_override
    assert by_file.feedforward.options["expansion"] == 4.0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "feedforward: mlp has no option multiple_of, so multiple_of=32 is dropped",
        "feedforward=mlp replaces gated_mlp: by default activation='gelu' (was 'silu'), bias=True (was False); "
        "dropped multiple_of=32, which mlp does not have",
    ]


def test_files_of_every_group_are_choices(write: Write) -> None:
    folder = write(FILES)
    path = searchpath(folder)
    config = compose("narrow", [path, "feedforward=wide", "feedforward.expansion=2", "train=long", "fusion=mine"])
    assert config.model.options == {**compose().model.options, "hidden_dim": 32}
    assert (config.feedforward.name, config.feedforward.options["expansion"]) == ("gated_mlp", 2.0)
    # gpt_nano sets dropout, and a swap keeps it
    assert config.feedforward.options["dropout"] == 0.1
    assert (config.train.steps, config.fusion.scope) == (9000, "block")
    assert choices("model", [str(folder)]) == tuple(sorted({*choices("model"), "mine", "ours", "narrow"}))
    assert choices("feedforward", [str(folder)]) == tuple(sorted({*choices("feedforward"), "wide"}))
    with pytest.raises(ValueError, match=r"^no model 'mien'; did you mean 'mine'\? .* mine, .*narrow, .*ours"):
        compose("mien", [path])
    with pytest.raises(ValueError, match=r"^no feedforward 'wied'; did you mean 'wide'\? there are: .*, wide$"):
        compose(overrides=[path, "feedforward=wied"])


def test_the_first_folder_wins_and_the_shipped_one_is_before_all(write: Write, tmp_path: Path) -> None:
    first = write(FILES)
    second = tmp_path / "second"
    (second / "train").mkdir(parents=True)
    (second / "train" / "long.yaml").write_text("defaults: [default]\nsteps: 1\n")
    (second / "train" / "short.yaml").write_text("defaults: [default]\nsteps: 2\n")
    for folders, long in (((first, second), 9000), ((second, first), 1)):
        path = searchpath(*folders)
        assert compose(overrides=[path, "train=long"]).train.steps == long
        assert compose(overrides=[path, "train=short"]).train.steps == 2
    (second / "train" / "quick.yaml").write_text("steps: 3\n")
    with pytest.raises(
        ValueError, match=r"second/train/quick.yaml: 'quick' is a shipped or registered train, which hi"
    ):
        compose(overrides=[searchpath(second)])


@pytest.mark.usefixtures("own_components")
@pytest.mark.parametrize(("group", "name"), [("norm", "mine_by_import"), ("model", "decoder")])
def test_the_name_of_a_registered_component_keeps_its_meaning(group: str, name: str, write: Write) -> None:
    register("norm", "mine_by_import")(RMSNorm)
    folder = write({f"{group}/{name}.yaml": "name: rms_norm\n"})
    text = (
        f"{folder}/{group}/{name}.yaml: {name!r} is a shipped or registered {group}, which hides this file; "
        f"rename it, for example to my_{name}.yaml"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        compose("mixtral_tiny", [searchpath(folder)])
    (folder / group / f"{name}.yaml").rename(folder / group / f"my_{name}.yaml")
    assert compose("mixtral_tiny", [searchpath(folder)]) == compose("mixtral_tiny")


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("[pkg://os]", NotADirectoryError, "hydra.searchpath: there is no folder /"),
        ("[/nowhere/at/all]", NotADirectoryError, "hydra.searchpath: there is no folder /nowhere/at/all"),
        (
            "/my/configs",
            ValueError,
            "hydra.searchpath must be a list of folders, such as [/my/configs], got '/my/configs'",
        ),
        ("['${oc.env:HOME}']", ValueError, "resolvers such as ${oc.env:...} are not run"),
    ],
)
def test_search_paths_that_are_refused(value: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        compose(overrides=[f"hydra.searchpath={value}"])


ENTRY = (
    "x.yaml: an entry of defaults must be the name of a file of the same group or, in a file of model, "
    "override /component: choice, got "
)
PACKAGE = (
    "is refused: a file sets options of its group. Only a file of model may begin with # @package _global_, and then "
    "sets sections: model, feedforward, attention, norm, residual, position"
)
# One case for each kind of line in a file: name, package, entry of defaults, section, option, value.
REFUSED = [
    ({"model/x.yaml": "hidden_dim: !!python/name:os.system ''"}, "model=x", "YAML tags are refused"),
    ({"model/x.yaml": "_target_: os.system"}, "model=x", "'_target_' is refused: a config names registered components"),
    (
        {"model/x.yaml": "- a"},
        "model=x",
        "x.yaml: a group file must be a mapping of options, whose defaults are a list",
    ),
    ({"model/x.yaml": "defaults: y"}, "model=x", "a group file must be a mapping of options, whose defaults are a"),
    ({"model/x.yaml": "defaults: [../../../etc/passwd]"}, "model=x", "no model '../../../etc/passwd'"),
    ({"model/x.yaml": "defaults: ['${oc.env:HOME}']"}, "model=x", "resolvers such as ${oc.env:...} are not run"),
    ({"model/x.yaml": "defaults: [{override /fusion: 'off'}]"}, "model=x", f"{ENTRY}{{'override /fusion': 'off'}}"),
    ({"model/x.yaml": "defaults: [{override /norm: [a]}]"}, "model=x", f"{ENTRY}{{'override /norm': ['a']}}"),
    ({"model/x.yaml": "defaults: [{override /norm: _self_}]"}, "model=x", "no norm '_self_'; there are: "),
    ({"model/x.yaml": "defaults: [null]"}, "model=x", f"{ENTRY}None"),
    ({"norm/x.yaml": "defaults: [{override /norm: dyt}]"}, "norm=x", f"{ENTRY}{{'override /norm': 'dyt'}}"),
    ({"train/x.yaml": "# @package _global_\nsteps: 1"}, "train=x", f"train/x.yaml: the package '_global_' {PACKAGE}"),
    ({"model/x.yaml": "# mine\n# @package _global_\ndefaults: [gpt_nano]"}, "model=x", PACKAGE),
    ({"other/x.yaml": "eps: 1"}, "norm=dyt", "has no folder named after a group: model, feedforward, attention"),
    ({"model/x.yaml": "# @package norm\ndefaults: [gpt_nano]"}, "model=x", f"the package 'norm' {PACKAGE}"),
    ({"model/x.yaml": "# @package _global_\ntrain: {steps: 1}"}, "model=x", f"the package '_global_' {PACKAGE}"),
    ({"model/x.yaml": "# @package _global_\nmodel: 5"}, "model=x", f"the package '_global_' {PACKAGE}"),
    ({"model/x.yaml": ""}, "model=x", "model must name a model, got None; there are: decoder, encoder"),
    (
        {"model/x.yaml": "defaults: [y]", "model/y.yaml": "defaults: [x]"},
        "model=x",
        "model=x: the files include each other in a circle",
    ),
    ({"norm/x.yaml": "eps: 1"}, "norm=x", "norm must name a norm, got None; there are: dyt, layer_norm, rms_norm"),
    ({"model/x.yaml": "defaults: [gpt_nano]\nhidra: 1"}, "model=x", "no decoder option 'hidra'"),
    ({"train/x.yaml": "defaults: [default]\nsteps: {a: 1}"}, "train=x", "train.steps must be a whole number"),
]


@pytest.mark.parametrize(("files", "override", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_files_that_are_refused(
    files: dict[str, str], override: str, text: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "the secret")
    folder = write(files)
    with pytest.raises(ValueError, match=re.escape(text)) as caught:
        compose(overrides=[searchpath(f"'{folder}'"), override])
    assert "the secret" not in str(caught.value)


def test_a_file_builds_on_files_of_groups_alone(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A file outside the groups is not checked, and Hydra runs the resolvers of its defaults.
    monkeypatch.setenv("HOME", "the secret")
    (tmp_path / "outside.yaml").write_text("defaults: ['${oc.env:HOME}']\n")
    for entry, text in (
        ("../../outside", "no train '../../outside'"),
        ("/../outside", "no train '/../outside'"),
        ("/train/../..: outside", "an entry of defaults must be the name of a file"),
    ):
        folder = write({"train/x.yaml": f"defaults: [default, {entry}]\n"})
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            compose(overrides=[searchpath(f"'{folder}'"), "train=x"])
        assert "the secret" not in str(caught.value)
