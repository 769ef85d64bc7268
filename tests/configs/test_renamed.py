"""Configs of older versions: each old name is answered with the new one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fuselayers.components import registry
from fuselayers.configs import compose
from fuselayers.configs.overrides import Layer
from fuselayers.configs.renamed import check_renamed

# What `to_yaml(compose("llama_tiny", ["train=quick"]))` wrote before positions and residual styles were groups.
OLD = """\
model:
  name: decoder
  vocab_size: 256
  hidden_dim: 256
  num_layers: 6
  context_length: 256
  position:
    name: rotary
    base: 10000.0
    interleaved: false
    fraction: 1.0
  block:
    name: pre_norm
  dropout: 0.0
  tie_embeddings: false
  init_std: 0.02
feedforward:
  name: gated_mlp
  expansion: 2.6666666666666665
  multiple_of: 32
  activation: silu
  bias: false
  dropout: 0.0
attention:
  name: multi_head
  num_heads: 8
  num_kv_heads: 2
  head_dim: null
  bias: false
  dropout: 0.0
norm:
  name: rms_norm
  eps: 1.0e-06
fusion:
  backend: auto
  partition: min_cut
  scope: model
train:
  steps: 10
  batch_size: 4
  accumulate: 1
  learning_rate: 0.004
  min_learning_rate: 4.0e-05
  warmup_steps: 2
  weight_decay: 0.1
  beta1: 0.9
  beta2: 0.95
  clip_norm: 1.0
  precision: float32
  seed: 1234
  evaluate_every: 5
  evaluate_batches: 1
  checkpoint_every: 5
  resume: ''
  output: ''
  sample_bytes: 80
  compare: false
  device: auto
data:
  path: ''
  sequence_length: 0
  held_out: 0.1
  suffixes:
  - .py
"""


def message(source: Any, overrides: list[str]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the callers compare the text)
        compose(source, overrides)
    return str(caught.value)


def test_a_whole_old_config_gets_one_message_that_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(OLD)
    said = message(path, [])
    assert said == (
        "this config is of an older fuselayers: "
        "model.position is now position: write position=rotary; "
        "model.position.base is now position.base: write position.base=10000.0; "
        "model.position.interleaved is now position.interleaved: write position.interleaved=false; "
        "model.position.fraction is now position.fraction: write position.fraction=1.0; "
        "model.block=pre_norm is now residual=pre: write residual=pre"
    )
    # the file without the old names, and what the message says to write
    written = [part.rpartition(": write ")[2] for part in said.split("; ")]
    without = "\n".join(line for line in OLD.splitlines() if line.split(":")[0] not in old_lines())
    path.write_text(without)
    assert compose(path, written) == compose("llama_tiny", ["train=quick"])


def old_lines() -> set[str]:
    lines = OLD.splitlines()
    first, last = lines.index("  position:"), lines.index("    name: pre_norm")
    return {line.split(":")[0] for line in lines[first : last + 1]}


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["model.position=rotary"], "model.position is now position: write position=rotary"),
        (["model.position.base=500"], "model.position.base is now position.base: write position.base=500"),
        (["model.position={name: none}"], "model.position is now position: write position=none"),
        (["model.block=pre_norm"], "model.block=pre_norm is now residual=pre: write residual=pre"),
        (["model.block=post_norm"], "model.block=post_norm is now residual=post: write residual=post"),
        (["model.block={name: post_norm}"], "model.block=post_norm is now residual=post: write residual=post"),
        (
            ["train.seed=${model.position.base}"],
            "train.seed refers to ${model.position.base}, which is now position.base: write ${position.base}",
        ),
    ],
)
def test_an_old_override_is_answered_with_the_new_one(overrides: list[str], text: str) -> None:
    assert message("gpt_nano", overrides) == text
    group, _, rest = overrides[0].partition(".")
    key, _, value = rest.partition("=")
    if "." not in key and "{" not in value:
        assert message({group: {key: value}}, []) == text


def test_names_in_a_file_and_in_overrides_are_told_together() -> None:
    said = message({"model": {"position": "learned"}}, ["model.block=post_norm"])
    assert said == (
        "this config is of an older fuselayers: model.position is now position: write position=learned; "
        "model.block=post_norm is now residual=post: write residual=post"
    )


@pytest.mark.parametrize("name", ["bias_dropout_residual", "bias_dropout_residual_layer_norm"])
def test_a_name_that_moved_to_another_kind(name: str) -> None:
    assert message("gpt_nano", [f"residual={name}"]).endswith(f"post, pre, sandwich; {name!r} is of the kind fused")
    assert message({"residual": {"name": name}}, []).endswith(f"; {name!r} is of the kind fused")
    assert message("gpt_nano", ["feedforward=rms_norm"]).endswith("mlp; 'rms_norm' is of the kind norm")


def test_a_models_own_option_of_an_old_name_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tiny(nn.Module):
        built_in = frozenset({"attention", "feedforward", "norm", "residual"})

        def __init__(self, *, position: int = 3, **parts: Any) -> None:
            super().__init__()

    monkeypatch.setitem(registry._OWNERS["model"], "tiny", Tiny)
    monkeypatch.setitem(Tiny.__init__.__globals__, "Any", Any)
    mine = {"model": {"name": "tiny", "position": 5}, "feedforward": {"dropout": 0.0}}
    assert compose(copy.deepcopy(mine)).model.options["position"] == 5
    monkeypatch.setitem(registry._OWNERS["block"], "pre_norm", nn.Identity)
    assert compose(overrides=["model.block=pre_norm"]).model.options["block"].name == "pre_norm"


def test_a_model_that_nobody_registered() -> None:
    with pytest.raises(ValueError, match=r"^model.position is now position: write position=rotary$"):
        check_renamed([Layer(settings={"model": {"position": "rotary"}})], model="nobody's")
