import functools
import inspect
import re
from pathlib import Path

import pytest
import torch

import fuselayers
from fuselayers.components import create, registry
from fuselayers.configs import GROUPS, choices
from fuselayers.configs.tables import TABLES, option_rows
from fuselayers.other_names import _THEIRS, ours_for, plain


def test_every_name_that_a_hint_gives_is_ours() -> None:
    known = {row.option for table in TABLES for row in option_rows(table)}
    known |= {name for kind in registry.KINDS for name in registry.names(kind)}
    known |= set(GROUPS)
    known |= {name for group in GROUPS for name in choices(group)}
    for model in map(functools.partial(registry.get, "model"), registry.names("model")):
        methods = model.forward, getattr(model, "generate", model.forward)  # type: ignore[attr-defined]
        known |= {name for method in methods for name in inspect.signature(method).parameters}
    assert {ours.partition(" ")[0] for ours in _THEIRS} <= known


def test_their_names_are_written_plainly_and_are_no_other_spelling_of_ours() -> None:
    for ours, theirs in _THEIRS.items():
        for name in theirs.split():
            assert name == plain(name)
            assert name != plain(ours)
        assert len(set(theirs.split())) == len(theirs.split()), ours


def test_a_name_may_have_several_meanings() -> None:
    assert ours_for("Sliding-Window") == ("window", "local")
    assert ours_for("nothing_of_the_kind") == ()


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


def test_an_attribute_that_nobody_has() -> None:
    with pytest.raises(AttributeError, match=r"^module 'fuselayers' has no attribute 'nosuch'$"):
        _ = fuselayers.ops.nosuch


@pytest.mark.parametrize(
    ("name", "hint"),
    [("reversible", "'model' with block=reversible"), ("use_rotary_embeddings", "'position' with name=rotary")],
)
def test_an_option_of_xformers_at_the_top_of_a_config(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"did you mean {hint}"):
        fuselayers.build({"model": {"name": "decoder"}, name: True})


@pytest.mark.parametrize("scope", ["none", "block", "model"])
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


def test_a_list_of_blocks_as_a_config(tmp_path: Path) -> None:
    end = r"got a list; the list of blocks of xFormers is one mapping here, {\"model\": {\"name\": \"decoder\", "
    blocks = [{"block_type": "encoder", "num_layers": 2, "dim_model": 64}]
    with pytest.raises(TypeError, match=f"^a config is the name of a shipped model, the path of .*, {end}"):
        fuselayers.build(blocks)
    (tmp_path / "blocks.yaml").write_text("- block_type: encoder\n  num_layers: 2\n")
    with pytest.raises(ValueError, match=f"^a config must be a mapping of groups, {end}"):
        fuselayers.build(tmp_path / "blocks.yaml")


def test_a_width_by_the_name_of_xformers() -> None:
    with pytest.raises(ValueError, match=r"does not take the argument 'dim_model'; here it is hidden_dim$"):
        create("feedforward", "mlp", dim_model=64)
