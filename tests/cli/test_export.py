from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fuselayers
from fuselayers.cli.export import export
from fuselayers.cli.main import main
from fuselayers.cli.train.checkpoint import read_checkpoint, save, whole_tensors
from tests.cli.conftest import tiny_on, write_text_file
from tests.cli.train.conftest import newest, run_train
from tests.cli.train.test_checkpoint import files_of_at_most

safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The newest checkpoint of a run."""
    folder = tmp_path_factory.mktemp("trained")
    run_train([*tiny_on(write_text_file(folder)), "train.steps=8", f"train.output={folder / 'run'}"])
    return newest(folder / "run")


def test_what_is_exported_comes_back_bit_for_bit(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "folder" / "model"
    assert main(["export", str(trained.parents[1]), "--out", str(out)]) == 0
    weights = whole_tensors(trained, prefix="model.")
    count = sum(tensor.numel() for tensor in weights.values())
    printed = " ".join(capsys.readouterr().out.split())
    assert printed == f"the model of {trained}, {count:,} numbers, is in {out}"
    assert sorted(path.name for path in out.iterdir()) == ["config.yaml", "model.safetensors"]
    assert list(out.parent.iterdir()) == [out]
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {
        (trained / "manifest.json").stat().st_mode & 0o777
    }

    model = fuselayers.from_pretrained(out)
    assert not model.training
    for state in (model.state_dict(), safetensors.load_file(out / "model.safetensors")):
        assert state.keys() == weights.keys()
        assert all(state[name].dtype == tensor.dtype for name, tensor in weights.items())
        assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    # The exported model computes what the trained model computes.
    again = fuselayers.build(out / "config.yaml").eval()
    again.load_state_dict(weights)
    tokens = torch.arange(16).view(2, 8)
    assert torch.equal(model(tokens), again(tokens))
    # The loaded model does not need its file.
    (out / "model.safetensors").unlink()
    assert torch.equal(model(tokens), again(tokens))


def test_an_older_checkpoint_is_exported_by_its_name(trained: Path, tmp_path: Path) -> None:
    older = trained.with_name("step-000004")
    export(str(older), tmp_path / "model")
    weights = whole_tensors(older, prefix="model.")
    state = fuselayers.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in weights.items())
    last = whole_tensors(trained, prefix="model.")
    assert not all(torch.equal(state[name], tensor) for name, tensor in last.items())


def test_overrides_and_dtype_are_those_of_from_pretrained(trained: Path, tmp_path: Path) -> None:
    export(str(trained), tmp_path / "model")
    model = fuselayers.from_pretrained(tmp_path / "model", ["model.dropout=0.25"], dtype=torch.bfloat16)
    assert model.built_from.model.options["dropout"] == 0.25
    weights = whole_tensors(trained, prefix="model.")
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor.bfloat16()) for name, tensor in weights.items())
    text = (
        r"^the weights of '.*model' do not fit its config: Error.* Missing key.*; leave out overrides that "
        r"change the architecture$"
    )
    with pytest.raises(ValueError, match=text):
        fuselayers.from_pretrained(tmp_path / "model", ["model.num_layers=2"])
    with pytest.raises(ValueError, match=r"config: Error.* Unexpected key.*; .*"):
        fuselayers.from_pretrained(tmp_path / "model", ["norm=rms_norm"])
    with pytest.raises(ValueError, match=r"config: Error.* size mismatch for .*; leave out"):
        fuselayers.from_pretrained(tmp_path / "model", ["model.hidden_dim=32"])


def test_what_cannot_be_exported_is_said(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: object) -> str:
        assert main(["export", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    out = tmp_path / "model"
    assert said(tmp_path, "--out", out).startswith(f"fuselayers: no checkpoint {tmp_path}: it has no manifest.json;")
    assert said(trained, "--out", tmp_path) == f"fuselayers: {tmp_path} already exists; choose another --out\n"
    with files_of_at_most(3000):
        assert said(trained, "--out", out).startswith(f"fuselayers: cannot write {out}: ")
    assert not out.exists()
    assert said(trained, "--out", trained / "manifest.json" / "model").startswith("fuselayers: Not a directory: ")

    content = replace(read_checkpoint(trained), config_yaml="model: 3\n")
    path = save(tmp_path / "other", whole_tensors(trained), content)
    assert said(path, "--out", out).startswith(f"fuselayers: the config in the checkpoint {path} does not compose: ")
