"""Configs from a stranger: through every door, each is refused by its text, and nothing of it runs."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from fuselayers.configs import compose
from fuselayers.configs.sources import plain_sections

CALL = "is refused: a config names registered components, it cannot call code"
STAND_ALONE = "${...} may only stand alone and name another value"
RESOLVER = f"is refused: {STAND_ALONE}"
HYDRA = "is refused: Hydra only composes here, its own settings are not part of a config"
TAG = "YAML tags are refused, got one in line"

OVERRIDES = [
    ("_target_=os.system", f"'_target_' {CALL}"),
    ("model._target_=os.system", f"'model._target_' {CALL}"),
    ("feedforward._target_=torch.load", f"'feedforward._target_' {CALL}"),
    ("feedforward={_target_: builtins.eval, _args_: [1]}", f"'feedforward._target_' {CALL}"),
    ("position={name: rotary, _target_: os.system}", f"'position._target_' {CALL}"),
    ("position._partial_=true", f"'position._partial_' {CALL}"),
    ("residual._target_=torch.load", f"'residual._target_' {CALL}"),
    ("residual.layer_scale=${oc.env:HOME}", f"residual.layer_scale='${{oc.env:HOME}}' {RESOLVER}"),
    ("model.embedding_dropout=${oc.env:HOME}", f"model.embedding_dropout='${{oc.env:HOME}}' {RESOLVER}"),
    ("model.embedding_dropout=2", "model.embedding_dropout must be at least 0 and at most 1, got 2"),
    ("model.head_bias=os.system", "model.head_bias must be true or false, got 'os.system'"),
    ("model.embedding_norm={_target_: os.system}", f"'model.embedding_norm._target_' {CALL}"),
    ("residual={name: parallel, separate_norms: 2}", "residual.separate_norms must be true or false, got 2"),
    ("residual=../pre", "no residual '../pre'"),
    ("position=torch.nn.Embedding", "no position 'torch.nn.Embedding'"),
    ("model.block._target_=os.system", f"'model.block._target_' {CALL}"),
    ("model.layers=[{at: 0, _target_: os.system}]", f"'model.layers[0]._target_' {CALL}"),
    ("model.layers=[{at: 0, feedforward: {_target_: os.system}}]", f"'model.layers[0].feedforward._target_' {CALL}"),
    ("model.layers=[{at: 0, norm: '${oc.env:HOME}'}]", f"model.layers[0].norm='${{oc.env:HOME}}' {RESOLVER}"),
    ("model.layers=[{at: '${oc.env:HOME}', norm: rms_norm}]", f"model.layers[0].at='${{oc.env:HOME}}' {RESOLVER}"),
    ("model.layers=[{at: 0, norm: os.system}]", "no norm 'os.system'"),
    (
        "model.layers=[{at: 0, position: rotary}]",
        "no component in model.layers[0] 'position'; there are: attention, block",
    ),
    ("model.layers=[{at: 0, block: {name: os.system}}]", "no block 'os.system'"),
    ("model.layers=[{at: 0}]", "model.layers[0] must say at which layers and what changes"),
    ("model.layers=[{norm: rms_norm}]", "model.layers[0] must say at which layers and what changes"),
    ("model.layers=[rms_norm]", "model.layers[0] must say at which layers and what changes"),
    ("model.layers=rms_norm", "model.layers must be a list of mappings"),
    ("model.layers={at: 0}", "model.layers must be a list of mappings"),
    ("model.layers=[{at: 0, norm: [rms_norm]}]", "model.layers[0].norm must be a name or a mapping of options"),
    ("model.layers=[{at: 0, norm: {eps: -1}}]", "model.layers[0].norm.eps must be at least 0, got -1.0"),
    ("model.layers=[{at: true, norm: rms_norm}]", "model.layers[0].at must be an index or a slice"),
    ("model.layers=[{at: [0], norm: rms_norm}]", "model.layers[0].at must be an index or a slice"),
    ("model.layers=[{at: 0.5, norm: rms_norm}]", "model.layers[0].at must be an index or a slice"),
    ("model.layers=[{at: '', norm: rms_norm}]", 'layers.at must be an index or a slice such as "0"'),
    ("model.layers=[{at: '::0', norm: rms_norm}]", 'layers.at must be an index or a slice such as "0"'),
    ("model.layers=[{at: '0:1:1:1', norm: rms_norm}]", 'layers.at must be an index or a slice such as "0"'),
    ("model.layers=[{at: 'range(3)', norm: rms_norm}]", 'layers.at must be an index or a slice such as "0"'),
    ("model.layers=[{at: 99, norm: rms_norm}]", "layers.at '99' names none of the 3 layers, 0 to 2"),
    ("model.num_layers=1e9", "model.num_layers must be a whole number, got 1000000000.0"),
    ("model.hidden_dim=-1", "model.hidden_dim must be at least 1, got -1"),
    ("feedforward.expansion=1" + "0" * 400, "feedforward.expansion must be a number, got 1000"),
    ("feedforward._recursive_=true", f"'feedforward._recursive_' {CALL}"),
    ("train._convert_=all", f"'train._convert_' {CALL}"),
    ("+feedforward._target_=os.system", "is refused: every option has its place already"),
    ("++train.anything=1", "is refused: every option has its place already"),
    ("~model", "is refused: every option has its place already"),
    ("feedforward@_global_=mlp", "is refused: every option has its place already"),
    ("train.output=${oc.env:HOME}", f"train.output='${{oc.env:HOME}}' {RESOLVER}"),
    ("train.output=${hydra:runtime.cwd}", RESOLVER),
    ("train.output=${now:%Y}", RESOLVER),
    ("train.output='${train.${oc.env:HOME}}'", RESOLVER),
    ("train.output='x${oc.env:HOME}'", RESOLVER),
    ("train.output='\\${oc.env:HOME}'", RESOLVER),
    ("train.output='${data.path}${data.path}'", RESOLVER),
    ("model=${oc.env:HOME}", f"model='${{oc.env:HOME}}' {RESOLVER}"),
    ("data.suffixes=[.py,'${oc.decode:1}']", f"data.suffixes[1]='${{oc.decode:1}}' {RESOLVER}"),
    ("hydra.run.dir=/tmp/x", HYDRA),
    ("hydra.searchpath=[pkg://os]", "hydra.searchpath: 'pkg://os' is refused: only folders are looked through"),
    ("hydra.searchpath.x=[/tmp]", HYDRA),
    ("+hydra.searchpath=[/tmp]", "is refused: every option has its place already"),
    ("hydra/launcher=basic", HYDRA),
    ("hydra/job_logging=disabled", HYDRA),
    ("+hydra.sweeper.x=1", HYDRA),
    ("searchpath=[/tmp]", "no config group 'searchpath'"),
    ("model=../../../etc/passwd", "no model '../../../etc/passwd'"),
    ("model=/etc/passwd", "no model '/etc/passwd'"),
    ("feedforward=torch.nn.Linear", "no feedforward 'torch.nn.Linear'"),
    ("feedforward.name=os.system", "no feedforward 'os.system'"),
    ("feedforward.activation=os.system", "no activation 'os.system'"),
    ("fusion.partition=os.system", "no partitioner 'os.system'"),
    ("model.block=builtins.eval", "no block 'builtins.eval'"),
    ("train.steps=1,2", "asks for several runs; give one value, or a list as [a,b]"),
    ("train.steps=glob(*)", "asks for several runs"),
    ("train.steps=range(1,5)", "asks for several runs"),
    ("--config-path=/tmp", "cannot read the override '--config-path=/tmp': write group=choice or group.option=value"),
    ("train.steps", "cannot read the override 'train.steps'"),
    ("train.steps=!!python/object/apply:os.system", "cannot read the override"),
    ("train.steps=" + "[" * 400, "cannot read the override"),
    ("train.steps=" + "[" * 4000 + "]" * 4000, f"cannot read the override '{'train.steps='.ljust(79, '[')}...: write"),
    ("train.steps=" + "1" * 5000, "cannot read the override"),
    ("train.output=" + "x" * 20_000, "an override may have 10,000 characters at most, got 20,013"),
    ("train.steps=[[[[[[[[1]]]]]]]]", "is nested deeper than 8 levels; no config is"),
    ("a.b.c.d.e.f.g.h.i.j=1", "is nested deeper than 8 levels; no config is"),
    ("model={hidden_dim: {_target_: os.system}}", f"'model.hidden_dim._target_' {CALL}"),
    ("model={1: 2}", "the keys of model must be text, got 1"),
]


@pytest.mark.parametrize(("override", "text"), OVERRIDES, ids=[override[:40] for override, _ in OVERRIDES])
def test_overrides(override: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "the secret")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        compose(overrides=[override])
    assert text in str(caught.value)
    assert "the secret" not in str(caught.value)


FILES = [
    ("feedforward: {_target_: os.system, command: touch TOUCHED}", f"'feedforward._target_' {CALL}"),
    ("_target_: os.system", f"'_target_' {CALL}"),
    ("model: {block: {_target_: torch.hub.load, name: transformer}}", f"'model.block._target_' {CALL}"),
    ("!!python/object/apply:os.system ['touch TOUCHED']", f"{TAG} 1"),
    ("model: !!python/object/apply:os.system ['touch TOUCHED']", f"{TAG} 1"),
    ("model: !!python/name:os.system ''", f"{TAG} 1"),
    ("train:\n  output: !!python/object/apply:pathlib.Path [x]", f"{TAG} 2"),
    ("train: {output: !env HOME}", f"{TAG} 1: a config holds plain values"),
    ("train: {steps: !!int '5'}", f"{TAG} 1"),
    ("train: &t {steps: 5}\ndata: *t", "YAML anchors are refused, got one in line 1: write the value out"),
    ("train:\n  output: '${oc.env:HOME}'", f"line 2: {STAND_ALONE}"),
    ("${oc.env:HOME}", "a config must be a mapping of groups, got a single value"),
    ("'${oc.env:HOME}': 1", f"line 1: {STAND_ALONE}"),
    ("train: ${oc.create:{steps:1}}", f"line 1: {STAND_ALONE}"),
    ("train: '${oc.create:{steps:1}}'", f"line 1: {STAND_ALONE}"),
    ("hydra: {searchpath: [/tmp]}", f"'hydra' {HYDRA}"),
    ("hydra: {run: {dir: /tmp}}", f"'hydra' {HYDRA}"),
    ("defaults: [{hydra/launcher: x}]", "no config group 'hydra/launcher'"),
    ("defaults: [{'override hydra/job_logging': x}]", "no config group 'hydra/job_logging'"),
    ("defaults: [{model: ../../../etc/passwd}]", "no model '../../../etc/passwd'"),
    ("defaults: [/etc/passwd]", "an entry of defaults must be group: choice, got '/etc/passwd'"),
    (f"{'x' * 100}: 1\n{'x' * 100}: 2", f"not YAML, line 2: found duplicate key '{'x' * 79}..."),
    ("model: gpt_nano\nmodel: bert_base", "not YAML, line 2: found duplicate key 'model'"),
    ("# nothing\n", "a config must be a mapping of groups, got nothing"),
    ("5", "a config must be a mapping of groups, got a single value"),
    ("[model]", "a config must be a mapping of groups, got a list"),
    ("train: {output: '" + "${a:" * 20_000 + "'}", "may only stand alone and name another value"),
    ("1: {steps: 5}", "the keys of a config must be text, got 1"),
    ("? [model]\n: gpt_nano", "not YAML, line 1"),
    ("--- {}\n--- {}", "not YAML"),
    ("a: " + "[" * 5000, "line 1 is nested deeper than 20 levels; no config is"),
    ("a: [" + "1, " * 10_001 + "]", "the config is larger than 10,000 values; no config is"),
    ("# " + "x" * 100_001, "a config file may have 100,000 bytes at most; no config is larger"),
    ("model: {steps: 5", "not YAML, line 1"),
    ("model: \x07", "not YAML"),
]


@pytest.mark.parametrize(("content", "text"), FILES, ids=[content[:40] for content, _ in FILES])
def test_files(content: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "the secret")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.yaml").write_text(content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
        compose("./theirs.yaml")
    assert text in str(caught.value)
    assert "the secret" not in str(caught.value)
    assert not (tmp_path / "TOUCHED").exists()


def test_more_layers_than_a_config_may_hold() -> None:
    entry = {"at": 0, "norm": "rms_norm"}
    with pytest.raises(ValueError, match=r"^model.layers may have 200 entries, got 201; one entry may change m"):
        compose({"model": {"layers": [entry] * 201}})
    with pytest.raises(ValueError, match=r"^the config is larger than 10,000 values; no config is$"):
        compose({"model": {"layers": [entry] * 10_000}})


@pytest.mark.slow
def test_as_many_layers_as_a_config_may_hold() -> None:
    every = {"at": ":", **{part: {} for part in ("attention", "feedforward", "norm", "residual", "block")}}
    config = compose({"model": {"layers": [every] * 200}})
    assert compose(plain_sections(config)) == config


def test_sizes_that_no_machine_holds_cost_nothing_to_compose() -> None:
    huge = 2**62
    asked = ["num_layers", "hidden_dim", "vocab_size", "context_length"]
    config = compose(
        {"model": {"layers": [{"at": "1::2", "norm": "rms_norm"}]}}, [f"model.{name}={huge}" for name in asked[1:]]
    )
    assert config.model.options["hidden_dim"] == huge
    deep = compose({"model": {"num_layers": 10**9, "layers": [{"at": "1::2", "norm": "rms_norm"}]}})
    assert deep.model.options["num_layers"] == 10**9


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(ValueError, match=r"theirs\.yaml: a config file must be UTF-8 text"):
        compose(tmp_path / "theirs.yaml")


@pytest.mark.parametrize(
    ("value", "kind"), [(print, "builtin_function_or_method"), (b"x", "bytes"), ({1}, "set"), (Path("x"), "PosixPath")]
)
def test_objects_in_a_mapping(value: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"train.output must be text, a number, .* got a {kind}"):
        compose({"train": {"output": value}})


def test_a_mapping_that_holds_itself() -> None:
    endless: dict[str, Any] = {}
    endless["model"] = endless
    with pytest.raises(ValueError, match=r"model.* is nested deeper than 8 levels; no config is"):
        compose(endless)


def test_no_module_is_imported_on_a_strangers_word() -> None:
    sys.modules.pop("antigravity", None)
    for override in ("feedforward._target_=antigravity.fly", "feedforward=antigravity", "model.block=antigravity"):
        with pytest.raises(ValueError, match=r"antigravity|_target_"):
            compose(overrides=[override])
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("overrides", ["model=gpt_nano", [5], [None]])
def test_overrides_of_another_type(overrides: Any) -> None:
    with pytest.raises(
        TypeError, match=r"overrides must be a list of strings, got the string|an override must be a str"
    ):
        compose(overrides=overrides)


@pytest.mark.parametrize(
    "content",
    [
        "my secret",
        "[my secret]",
        "user: ${DB_USER:-my secret}",
        "password: my secret",
        "my secret: &x 1",
        "a: *my_secret",
        "a: !my_secret x",
        "a: 'my secret",
        'a: "\\my \\secret"',
        "%my secret\n---\n1",
        "my secret\n\tx: y: z",
        "services: {web: {environment: {KEY: my secret}}}",
        "- my secret\n x",
        "a: 2024-01-01\n? [my secret]",
        "my secret\0",
        "model: [my secret]",
        "train: [{user: my secret}]",
        "defaults: my secret",
        "left_at_default: my secret",
    ],
)
def test_a_file_that_is_no_config_is_not_quoted(content: str, tmp_path: Path) -> None:
    path = tmp_path / "theirs.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"theirs\.txt: |no config group |must be a |must be the name of a ") as caught:
        compose(str(path))
    assert "secret" not in "".join(traceback.format_exception(caught.value))


LONG = "x" * 9000


@pytest.mark.parametrize(
    ("source", "overrides"),
    [
        ("gpt_nano", [f"feedforward={LONG}"]),
        ("gpt_nano", [f"{LONG}=1"]),
        ("gpt_nano", [f"feedforward.{LONG}=1"]),
        ("gpt_nano", [f"train.device=X{LONG}"]),
        ("gpt_nano", [f"train.precision={LONG}"]),
        ("gpt_nano", [f"train.steps={LONG}"]),
        ("gpt_nano", [f"train.steps=[{LONG}]"]),
        ("gpt_nano", [f"model.layers=[{LONG}]"]),
        ("gpt_nano", [LONG]),
        (LONG, []),
        ({LONG: 1}, []),
        ({"train": {LONG: 1}}, []),
        ({"train": {"steps": 10**5000}}, []),
        ({"defaults": [LONG]}, []),
        ({"left_at_default": [LONG]}, []),
        ([LONG], []),
    ],
    ids=range(16),
)
def test_an_error_quotes_the_beginning_of_a_long_value(source: Any, overrides: list[str]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        compose(source, overrides)
    assert len(str(caught.value)) < 800
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["train.steps", "train.accumulate", "model.num_layers", "attention.num_heads"])
def test_a_number_beyond_torchs_sizes_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=rf"^{option} must be below 2\*\*63, got 10{{30}}$"):
        compose("gpt_nano", [f"{option}={10**30}"])
