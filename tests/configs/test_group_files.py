"""The groups, and folders of a user's own through `hydra.searchpath`: their files, who wins, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hydra
import pytest
import torch
from hydra import initialize_config_module

from fuselayers.components import RMSNorm, names, registry
from fuselayers.configs import COMPONENT_GROUPS, build, choices, compose, to_yaml

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


@pytest.mark.parametrize("group", COMPONENT_GROUPS)
def test_every_component_has_a_file_for_hydra_applications(group: str) -> None:
    for name in names(group):
        with initialize_config_module("fuselayers.configs.groups", version_base="1.3"):
            assert hydra.compose("config", [f"{group}={name}"])[group].name == name


def test_an_unknown_group_has_no_choices() -> None:
    with pytest.raises(
        ValueError, match=r"^no config group 'models'; did you mean 'model'\? there are: attention, data"
    ):
        choices("models")


def test_a_component_that_a_user_registers_is_a_choice_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(torch.nn.Module):
        def __init__(self, hidden_dim: int, *, times: float = 2.0, dropout: float = 0.0) -> None:
            super().__init__()
            self.times = times
            self.dropout = dropout

    monkeypatch.setitem(registry._OWNERS["feedforward"], "doubled", Doubled)
    assert "doubled" in choices("feedforward")
    config = compose(overrides=["feedforward=doubled", "feedforward.times=3"])
    assert config.feedforward.options == {"times": 3.0, "dropout": config.model.options["dropout"]}
    layer = build(config, ["fusion=off", "model.num_layers=1"]).blocks[0].feedforward  # type: ignore[index, union-attr]
    assert (type(layer), layer.times) == (Doubled, 3.0)


def searchpath(*folders: Path | str) -> str:
    return f"hydra.searchpath=[{','.join(map(str, folders))}]"


def test_files_of_ones_own_build_on_shipped_ones(write: Write) -> None:
    found = searchpath(write(FILES))
    config = compose(overrides=[found, "model=mine"])
    expected = compose("llama_tiny", ["norm=layer_norm", "residual=sandwich", "residual.stochastic_depth=0.1"])
    assert (config.norm, config.residual, config.position) == (expected.norm, expected.residual, expected.position)
    assert config.model.options == {**expected.model.options, "num_layers": 2}
    # wide's expansion; its multiple_of is set by llama_tiny too, and a model's file wins over those of its parts
    assert config.feedforward.options == {**expected.feedforward.options, "expansion": 6.0}
    assert config.train == expected.train
    longer = replace(config.train, steps=9000)
    assert compose("mine", [found, "train=long"]) == replace(config, train=longer)
    assert compose("mine", [found]) == compose({"model": "mine"}, [found]) == config


def test_one_file_of_ones_own_builds_on_another_and_a_swap_drops_what_falls_away(write: Write) -> None:
    config = compose("ours", [searchpath(write(FILES))])
    assert config.feedforward.name == "mlp"  # mine's wide has options that an mlp has not
    assert (config.model.options["hidden_dim"], config.model.options["num_layers"]) == (64, 2)
    assert config.residual.name == "sandwich"


def test_an_option_of_a_file_stays_where_another_file_or_an_override_chooses(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    base = "# @package _global_\ndefaults: [llama_tiny]\nfeedforward: {expansion: 4}\n"
    plain = "# @package _global_\ndefaults: [base, override /feedforward: mlp]\n"
    found = searchpath(write({"model/base.yaml": base, "model/plain.yaml": plain}))
    by_file, by_override = compose("plain", [found]), compose("base", [found, "feedforward=mlp"])
    assert by_file == by_override
    assert by_file.feedforward.options["expansion"] == 4.0
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "feedforward: mlp has no option multiple_of, so multiple_of=32 is dropped",
        "feedforward=mlp replaces gated_mlp: by default activation='gelu' (was 'silu'), bias=True (was False); "
        "dropped multiple_of=32, which mlp does not have",
    ]


def test_files_of_every_group_are_choices(write: Write) -> None:
    folder = write(FILES)
    found = searchpath(folder)
    config = compose("narrow", [found, "feedforward=wide", "feedforward.expansion=2", "train=long", "fusion=mine"])
    assert config.model.options == {**compose().model.options, "hidden_dim": 32}
    assert (config.feedforward.name, config.feedforward.options["expansion"]) == ("gated_mlp", 2.0)
    # dropout is gpt_nano's, and stays in a swap
    assert config.feedforward.options["dropout"] == 0.1
    assert (config.train.steps, config.fusion.scope) == (9000, "block")
    assert choices("model", [str(folder)]) == tuple(sorted({*choices("model"), "mine", "ours", "narrow"}))
    assert choices("feedforward", [str(folder)]) == tuple(sorted({*choices("feedforward"), "wide"}))
    with pytest.raises(ValueError, match=r"^no model 'mien'; did you mean 'mine'\? .* mine, .*narrow, .*ours"):
        compose("mien", [found])
    with pytest.raises(ValueError, match=r"^no feedforward 'wied'; did you mean 'wide'\? there are: .*, wide$"):
        compose(overrides=[found, "feedforward=wied"])


def test_a_file_may_choose_a_file_too(write: Write) -> None:
    source = write(FILES) / "run.yaml"
    source.write_text("defaults: [{model: mine}, {train: long}]\nfeedforward: {expansion: 3}\n")
    config = compose(source, [searchpath(source.parent)])
    assert (config.train.steps, config.feedforward.options["expansion"]) == (9000, 3.0)


def test_a_saved_config_needs_no_search_path(write: Write, tmp_path: Path) -> None:
    config = compose("mine", [searchpath(write(FILES)), "feedforward=wide"])
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(config))
    assert "hydra" not in saved.read_text()
    assert compose(saved) == config


def test_the_first_folder_wins_and_the_shipped_one_is_before_all(write: Write, tmp_path: Path) -> None:
    first = write(FILES)
    second = tmp_path / "second"
    (second / "train").mkdir(parents=True)
    (second / "train" / "long.yaml").write_text("defaults: [default]\nsteps: 1\n")
    (second / "train" / "short.yaml").write_text("defaults: [default]\nsteps: 2\n")
    for folders, long in (((first, second), 9000), ((second, first), 1)):
        found = searchpath(*folders)
        assert compose(overrides=[found, "train=long"]).train.steps == long
        assert compose(overrides=[found, "train=short"]).train.steps == 2
    (second / "train" / "quick.yaml").write_text("steps: 3\n")
    with pytest.raises(
        ValueError, match=r"second/train/quick.yaml: train=quick is the shipped file, which hides this one, as in Hydra"
    ):
        compose(overrides=[searchpath(second)])


@pytest.mark.parametrize(("group", "name"), [("norm", "mine_by_import"), ("model", "decoder")])
def test_the_name_of_a_registered_component_keeps_its_meaning(
    group: str, name: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry._OWNERS["norm"], "mine_by_import", RMSNorm)
    folder = write({f"{group}/{name}.yaml": "name: rms_norm\n"})
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        compose("mixtral_tiny", [searchpath(folder)])
    assert str(caught.value) == (
        f"{folder}/{group}/{name}.yaml: {name!r} is a registered {group}, which this file would hide; "
        f"give it another name, such as my_{name}.yaml"
    )
    (folder / group / f"{name}.yaml").rename(folder / group / f"my_{name}.yaml")
    assert compose("mixtral_tiny", [searchpath(folder)]) == compose("mixtral_tiny")


def test_spellings_of_a_folder(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(FILES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for spelt in (f"file://{folder}", "my configs", "'my configs'", "./my configs/", "'~/my configs'"):
        assert compose(overrides=["hydra.searchpath=[a]", searchpath(spelt), "train=long"]).train.steps == 9000
    folder.rename(tmp_path / "it's, [a] $% \\ folder")
    spelt = '"it\'s, [a] $% \\ folder"'
    assert compose(overrides=[searchpath(spelt), "train=long"]).train.steps == 9000


def test_no_file_is_kept_between_two_calls(write: Write) -> None:
    folder = write(FILES)
    assert compose(overrides=[searchpath(folder), "train=long"]).train.steps == 9000
    write({"train/long.yaml": "defaults: [default]\nsteps: 8000\n"})
    assert compose(overrides=[searchpath(folder), "train=long"]).train.steps == 8000
    with pytest.raises(ValueError, match=r"^no train 'long'"):
        compose(overrides=["train=long"])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("[pkg://os]", ValueError, "'pkg://os' is refused: only folders are looked through"),
        ("[structured://]", ValueError, "'structured://' is refused: only folders are looked through"),
        ("['https://a.b/c']", ValueError, "not https://"),
        ("[/nowhere/at/all]", NotADirectoryError, "hydra.searchpath: there is no folder /nowhere/at/all (from /"),
        ("['~nobody-at-all/x']", NotADirectoryError, "hydra.searchpath: there is no folder ~nobody-at-all/x (from /"),
        ("/my/configs", ValueError, "hydra.searchpath must be a list of folders, as [/my/configs], got '/my/configs'"),
        ("[1]", ValueError, "must be a list of folders, as [/my/configs], got [1]"),
        ("{a: b}", ValueError, "must be a list of folders, as [/my/configs], got {'a': 'b'}"),
        ("['${oc.env:HOME}']", ValueError, "resolvers such as ${oc.env:...} are not run"),
        ("['${model.name}']", NotADirectoryError, "there is no folder ${model.name}"),
        ("[/usr]", ValueError, "hydra.searchpath: /usr holds no folder of a group; a file is found as model/mine.yaml"),
        ("a,b", ValueError, "asks for several runs"),
    ],
)
def test_search_paths_that_are_refused(value: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        compose(overrides=[f"hydra.searchpath={value}"])
    assert text in str(caught.value)


# One case for each line that a file may have: name, package, entry of defaults, section, option, value.
REFUSED = [
    ({"model/x.yaml": "hidden_dim: !!python/name:os.system ''"}, "model=x", "YAML tags are refused"),
    ({"model/x.yaml": "[1]"}, "model=x", "a group file must be a mapping of options, got a list"),
    ({"model/x.yaml": "_target_: os.system"}, "model=x", "'_target_' is refused: a config names registered components"),
    ({"model/x.yaml": "hydra: {searchpath: [/tmp]}"}, "model=x", "'hydra' is refused: Hydra only composes here"),
    ({"model/x.yaml": "defaults: [../../../etc/passwd]"}, "model=x", "no model '../../../etc/passwd'"),
    ({"model/x.yaml": "defaults: [{override /norm: ../../secret}]"}, "model=x", "no norm '../../secret'"),
    ({"model/x.yaml": "defaults: [{override /hydra/launcher: basic}]"}, "model=x", "an entry of defaults must be the"),
    ({"model/x.yaml": "defaults: ['${oc.env:HOME}']"}, "model=x", "resolvers such as ${oc.env:...} are not run"),
    ({"model/x.yaml": "defaults: gpt_nano"}, "model=x", "defaults must be a list, got 'gpt_nano'"),
    ({"train/x.yaml": "# @package _global_\nsteps: 1"}, "train=x", "the package '_global_' is refused"),
    ({"model/x.yaml": "# Mine.\n# @package _global_\nmodel: {}"}, "model=x", "must be the first line, as Hydra reads"),
    (
        {"model/x.yaml": "# @package _global_\ntrain: {steps: 1}"},
        "model=x",
        "a file of model sets options of the model and its components, not train: {'steps': 1}; it chooses components",
    ),
    ({"model/x.yaml": "# @package _global_\nhidra: {}"}, "model=x", "no config group 'hidra'"),
    ({"model/x.yaml": "# @package _global_\nnorm: rms_norm"}, "model=x", "not norm: 'rms_norm'; it chooses components"),
    ({"model/x.yaml": "defaults: [gpt_nano]\nhidden_dims: 8"}, "model=x", "x.yaml: no model option 'hidden_dims'"),
    ({"model/x.yaml": "hidden_dim: 8"}, "model=x", "model must name a model, got None; there are: decoder, encoder"),
    (
        {"model/x.yaml": "defaults: [y]", "model/y.yaml": "defaults: [x]"},
        "model=x",
        "model=x: the files build on each other, in a circle",
    ),
    (
        {"norm/x.yaml": "eps: 1"},
        "norm=x",
        "norm must name a norm, got None; there are: dyt, layer_norm, rms_norm, skip",
    ),
    ({"norm/x.yaml": "name: rms_norm\nbias: true"}, "norm=x", "no rms_norm option 'bias'; there are: eps"),
    ({"train/x.yaml": "defaults: [_self_, _self_]"}, "train=x", "cannot compose model=gpt_nano train=x: Duplicate"),
    ({"train/x.yaml": "defaults: [default]\nsteps: {a: 1}"}, "train=x", "train.steps must be a whole number"),
    ({"train/x y.yaml": "steps: 1"}, "train=quick", "the name of a group file must be a letter, then"),
]


@pytest.mark.parametrize(("files", "override", "text"), REFUSED, ids=[text for *_, text in REFUSED])
def test_files_that_are_refused(
    files: dict[str, str], override: str, text: str, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "the secret")
    folder = write(files)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        compose(overrides=[searchpath(f"'{folder}'"), override])
    assert text in str(caught.value)
    assert "the secret" not in str(caught.value)


def test_links_that_lead_out_and_pipes_are_not_read(write: Write, tmp_path: Path) -> None:
    folder = write({"train/long.yaml": "defaults: [default]\nsteps: 5\n"})
    (tmp_path / "secret.yaml").write_text("steps: 6\n")
    (folder / "train" / "out.yaml").symlink_to(tmp_path / "secret.yaml")
    with pytest.raises(ValueError, match=r"train/out.yaml leads out of its folder, to .*secret.yaml; copy the file"):
        compose(overrides=[searchpath(folder)])
    (folder / "train" / "out.yaml").unlink()
    os.mkfifo(folder / "train" / "pipe.yaml")  # whoever opens it waits for ever
    with pytest.raises(ValueError, match=r"train/pipe.yaml is no file$"):
        compose(overrides=[searchpath(folder)])


def test_a_source_may_not_name_folders(write: Write, tmp_path: Path) -> None:
    folder = write(FILES)
    source = tmp_path / "theirs.yaml"
    source.write_text(f"hydra: {{searchpath: ['{folder}']}}\n")
    for asked in (source, {"hydra": {"searchpath": [str(folder)]}}, {"hydra.searchpath": [str(folder)]}):
        with pytest.raises(ValueError, match=r"'hydra' is refused: .* override names folders|no config group 'hydra"):
            compose(asked)
