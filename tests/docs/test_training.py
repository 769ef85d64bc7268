"""The torchtitan example of docs/training.md, skipped without torchtitan. test_docs.py runs the other examples."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import torch

_PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_torchtitans_feed_forward_takes_the_fused_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear: Any = pytest.importorskip("torchtitan.models.common.linear")
    stock: Any = pytest.importorskip("torchtitan.models.common.feed_forward")
    (example,) = re.findall(r"```py\n(.*?)```", _PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "fused_gate.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    fused_gate: Any = importlib.import_module("fused_gate")
    sizes = {"w1": (8, 24), "w2": (24, 8), "w3": (8, 24)}
    config = stock.FeedForward.Config(
        **{
            name: linear.Linear.Config(in_features=rows, out_features=columns)
            for name, (rows, columns) in sizes.items()
        }
    )
    plain, fused = config.build(), fused_gate.fused_gate(config).build()
    fused.load_state_dict(plain.state_dict())
    x = torch.randn(3, 8)
    torch.testing.assert_close(fused(x), plain(x))
