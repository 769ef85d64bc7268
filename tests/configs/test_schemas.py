from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from fuselayers.configs import compose


@pytest.mark.parametrize(
    ("section", "changes", "text"),
    [
        # A case for each kind of range and type, and each rule between fields.
        ("train", {"steps": 0}, "train.steps must be at least 1, got 0"),
        ("train", {"beta2": 1.0}, "train.beta2 must be at least 0 and below 1, got 1.0"),
        (
            "train",
            {"seed": 2**63},
            "train.seed must be below 2**63, got 9223372036854775808",
        ),
        (
            "parallel",
            {"checkpointing": "blok"},
            "no parallel.checkpointing 'blok'; did you mean 'block'? there are: block, budget:0.5, none, selective",
        ),
        (
            "parallel",
            {"sequence": True},
            "parallel.sequence splits the tokens over a tensor-parallel group, but parallel.tp is 1; set parallel.tp=2",
        ),
        ("train", {"min_learning_rate": 1.0}, "got 1.0; lower it too"),
        (
            "train",
            {"device": "gpu 1"},
            "train.device must be auto (a GPU where there is one), cpu, or one GPU, such as cuda:0",
        ),
        ("train", {"compare": "yes"}, "train.compare must be true or false, got 'yes'"),
        ("data", {"held_out": 1.0}, "data.held_out must be above 0 and below 1, got 1.0"),
        ("fusion", {"scope": "modle"}, "no fusion.scope 'modle'; did you mean 'model'? there are: block, model"),
        (
            "fusion",
            {"partition": "min-cut"},
            "no partitioner 'min-cut'; did you mean 'min_cut'? there are: budget:0.5, def",
        ),
    ],
)
def test_a_section_cannot_be_made_wrong(section: str, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        replace(getattr(compose(), section), **changes)
