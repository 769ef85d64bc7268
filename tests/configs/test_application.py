"""A user's Hydra application has the shipped groups in its search path, and builds the config that it composed."""

import re
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from fuselayers.configs import compose
from tests.processes import run

PRIMARY = """\
hydra:
  searchpath: [pkg://fuselayers.configs.groups]
defaults:
  - fuselayers
  - train: mine
  - override model: llama_tiny
  - override fusion: "off"
  - _self_
model: {num_layers: 2, hidden_dim: 32}
optimizer: {_target_: torch.optim.AdamW, lr: "${train.rate}"}
home: ${oc.env:HOME}
"""
APPLICATION = """\
import sys
import hydra, torch, fuselayers
from hydra.core.hydra_config import HydraConfig

@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(cfg):
    model = fuselayers.build(cfg, ["model.context_length=64"])
    optimizer = hydra.utils.instantiate(cfg.optimizer, model.parameters())
    print(type(model).__name__, len(model.blocks), type(model.blocks[0].feedforward).__name__,
          model.blocks[0].feedforward.up.out_features, model.built_from.model.options["context_length"],
          optimizer.defaults["lr"], HydraConfig.get().job.name, hydra.compose("config").train.rate)

# Each argument is the command line of a run.
for line in sys.argv[1:]:
    sys.argv[1:] = line.split()
    main()
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    (tmp_path / "conf" / "train").mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text(PRIMARY)
    (tmp_path / "conf" / "train" / "mine.yaml").write_text("rate: 0.5\nepochs: 3\n")
    return tmp_path


def test_an_application_builds_what_it_composed(application: Path) -> None:
    lines = ("", "feedforward=mlp +feedforward.expansion=2 train.rate=0.25")
    done = run(APPLICATION, *lines, name=str(application / "application.py"), folder=application)
    assert (done.code, done.errors) == (0, "")
    built, *others = done.printed.splitlines()
    assert built == "Decoder 2 GatedMLP 96 64 0.5 application 0.5"
    assert any("feedforward: mlp has no option multiple_of, so multiple_of=32 is dropped" in line for line in others)
    assert others[-1] == "Decoder 2 MLP 64 64 0.25 application 0.5"


def application_config(**changes: Any) -> DictConfig:
    sections = {
        "model": {"name": "decoder", "vocab_size": 9, "hidden_dim": 8, "num_layers": 1, "context_length": 4},
        "feedforward": {"name": "mlp", "dropout": "${model.dropout}"},
        "attention": {"name": "multi_head", "num_heads": 2},
        "norm": {"name": "rms_norm"},
        "residual": {"name": "pre"},
        "position": {"name": "none"},
        "fusion": {"backend": "eager", "partition": "min_cut", "scope": "none"},
        "train": {"epochs": 3},
        "data": "/my/data",
        "optimizer": {"_target_": "torch.optim.AdamW"},
        "paths": {"home": "${oc.env:HOME}"},
    }
    sections["model"]["dropout"] = 0.25  # type: ignore[index]
    return OmegaConf.create({**sections, **changes})


def test_the_sections_of_a_model_are_taken_as_they_are_and_the_others_are_the_applications() -> None:
    config = compose(application_config(), ["model.dropout=0.5"])
    assert (config.norm.name, config.position.name, config.fusion.scope) == ("rms_norm", "none", "none")
    assert config.feedforward.options["dropout"] == 0.5
    # gpt_nano sets the dropout of its feedforward, but gpt_nano is no part of this config.
    assert compose(application_config(feedforward={"name": "fused_mlp"})).feedforward.options["dropout"] == 0.0
    assert (config.train, config.data) == (compose().train, compose().data)
    node = OmegaConf.create({"net": application_config()}).net
    assert compose(node, ["model.dropout=0.5"]) == config


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"norm": {"name": "rms_norm", "epps": 1}}, "no rms_norm option 'epps'; did you mean 'eps'?"),
        ({"norm": {"name": "rmsnorm"}}, "no norm 'rmsnorm'; did you mean 'rms_norm'?"),
        ({"norm": {"name": "rms_norm", "_target_": "x.y"}}, "'norm._target_' is refused"),
        (
            {"norm": {"name": "rms_norm", "eps": "${width}"}, "width": 1},
            "In your own application, call OmegaConf.resolve(cfg) first",
        ),
        ({"norm": {"name": "rms_norm", "eps": "${train.eps}"}}, "norm.eps refers to ${train.eps}, which this config"),
        ({"norm": {"eps": 1}}, "if it has every section of a model: write defaults: [fuselayers] in it"),
    ],
)
def test_errors(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        compose(application_config(**changes))
