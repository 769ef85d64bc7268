import functools
import inspect
import re

import pytest
import torch

import fuselayers
from fuselayers.components import registry
from fuselayers.configs import GROUPS, choices
from fuselayers.configs.tables import TABLES, option_rows
from fuselayers.other_names import _THEIRS


def test_every_name_that_a_hint_gives_is_ours() -> None:
    known = {row.option for table in TABLES for row in option_rows(table)}
    known |= {name for kind in registry.KINDS for name in registry.names(kind)}
    known |= set(GROUPS)
    known |= {name for group in GROUPS for name in choices(group)}
    for model in map(functools.partial(registry.get, "model"), registry.names("model")):
        methods = model.forward, getattr(model, "generate", model.forward)  # type: ignore[attr-defined]
        known |= {name for method in methods for name in inspect.signature(method).parameters}
    assert {ours.partition(" ")[0] for ours in _THEIRS} <= known


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
    model, tokens = fuselayers.build("gpt_nano", small), torch.zeros(1, 3, dtype=torch.int64)
    text = r"^no argument of Decoder.forward 'labels'; did you mean 'targets_BT'\? there are: "
    with pytest.raises(TypeError, match=text):
        model(tokens, labels=tokens)
    with pytest.raises(TypeError, match=r"^Decoder.forward\(\) missing 1 required positional argument: 'tokens_BT'$"):
        model()
    text = r"^no argument of Decoder.generate 'max_new_tokens'; did you mean 'num_tokens'\? there are: "
    with pytest.raises(TypeError, match=text):
        model.generate(tokens, max_new_tokens=3)
