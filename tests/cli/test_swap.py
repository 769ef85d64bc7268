import sys
from pathlib import Path

import pytest

from fuselayers.cli.main import main

transformers = pytest.importorskip("transformers")


def test_a_folder_of_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=99
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert main(["swap", str(tmp_path), "--level", "layers", "--where", "model.layers.*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "swap, level layers: 8 modules"
    rows = {tuple(line.split()[:3]): line.split()[3] for line in lines[2:5]}
    assert rows.keys() == {
        ("LlamaMLP", "gated_mlp", "2"),
        ("LlamaRMSNorm", "rms_norm", "4"),
        ("LlamaAttention", "attention", "2"),
    }
    assert all(float(error) < 1e-2 for error in rows.values())


def test_a_folder_without_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (str(tmp_path), "gpt_nano"):
        assert main(["swap", name]) == 2
        assert "has no config.json; name a folder that save_pretrained wrote. For a" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForNothing"]}')
    assert main(["swap", str(tmp_path)]) == 2
    assert "has no class 'LlamaForNothing' (architectures)" in capsys.readouterr().err


def test_a_folder_without_transformers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["swap", str(tmp_path)]) == 2
    assert "a folder needs the package transformers: pip install transformers" in capsys.readouterr().err
