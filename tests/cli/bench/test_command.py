import json
import os
from pathlib import Path

import pytest
import torch

from fuselayers.cli.bench import command
from fuselayers.cli.main import main
from fuselayers.ops import dropout
from fuselayers.partition import BackendStatus
from tests.cli.conftest import TINY_MODEL

pytestmark = pytest.mark.usefixtures("without_inductor", "wide")


def _bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_times_an_op_plain_compiled_and_fused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ["op", "bias_activation_dropout", "--shape", "4x32", "--repeats", "3"]
    code, out, err = _bench(capsys, *arguments, "--backends", "eager", "--json", str(path))
    assert (code, err) == (0, "")
    assert "bias_activation_dropout, activation gelu, p 0.1, float32, 4x32" in out
    assert f"torch {torch.__version__}" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if " x " in line and "%" in line}
    assert list(rows) == ["plain", "torch.compile", "fuselayers", "eager"]
    assert rows["plain"][2:4] == ["1.00", "x"]
    content = json.loads(path.read_text())
    assert content["failed"] == {}
    for row in content["rows"]:
        times = row["seconds"]
        assert len(times["forward"]) == len(times["forward_backward"]) == 3
        assert float(rows[row["candidate"]][1]) == pytest.approx(sorted(times["forward"])[1] * 1e3, abs=1e-3)


@pytest.mark.slow  # it compiles in four new processes
def test_times_a_model_and_its_first_step(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path, folder = tmp_path / "model.json", os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    arguments = ["model", "gpt_nano", *TINY_MODEL, "--shape", "2x16", "--repeats", "1", "--json", str(path)]
    code, out, err = _bench(capsys, *arguments, "--backends", "eager,inductor")
    assert (code, err) == (0, "")
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == folder
    rows = {row["candidate"]: row["first_step"] for row in json.loads(path.read_text())["rows"]}
    assert rows.keys() == {"plain", "torch.compile", "plain, inductor", "eager", "inductor"}
    for name in ("torch.compile", "inductor"):
        cold, warm = rows.pop(name)
        assert 0 < warm < cold
        assert f"{cold:.1f} / {warm:.1f} s" in out
    assert set(rows.values()) == {None}


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_times_a_model(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr("fuselayers.cli.bench.command.first_steps", lambda call, name, imports: (9.0, 1.0))
    arguments = ["model", "gpt_nano", *TINY_MODEL, "--shape", "2x16", "--dropout", "0.2", "--repeats", "2"]
    code, out, err = _bench(capsys, *arguments, "--backends", "eager", "--dtype", dtype)
    assert (code, err) == (0, "")
    assert f"gpt_nano, 7,664 parameters, fused_mlp, {dtype}, 2x16" in out
    assert [line.split()[0] for line in out.splitlines() if "%" in line] == ["plain", "torch.compile", "eager"]


def test_wrong_numbers_are_not_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselayers.ops.dropout", lambda x, p, **options: dropout(x, p, **options) * 1.001)
    code, out, _ = _bench(capsys, "op", "dropout", "--shape", "4x32", "--repeats", "2", "--backends", "eager")
    assert code == 1
    for name in ("fuselayers", "eager"):
        assert f"{name} is not timed: output 0 is off by" in out
    assert [line.split()[0] for line in out.splitlines() if "%" in line] == ["plain", "torch.compile"]


def test_a_backend_that_is_missing_is_an_error_when_asked_for_and_left_out_when_not(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = (
        BackendStatus("eager", True, "here", ""),
        BackendStatus("inductor", False, "no C++ compiler", "apt install g++"),
    )
    monkeypatch.setattr(command, "backends", lambda device: statuses)
    arguments = ("op", "dropout", "--shape", "4x32", "--repeats", "2")
    code, _, err = _bench(capsys, *arguments, "--backends", "inductor")
    assert (code, err) == (
        2,
        "fuselayers: backend 'inductor' is not available: no C++ compiler; apt install g++\n",
    )
    code, out, _ = _bench(capsys, *arguments)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "%" in line][-1] == "fuselayers"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["opp", "dropout"], "no subject of bench 'opp'; did you mean 'op'? there are: model, op"),
        (["op", "dropuot"], "no op 'dropuot'; did you mean 'dropout'?"),
        (
            ["op", "dropout", "--shape", "8xx2"],
            "--shape must be sizes above 0 with x between them, such as 4x128, got '8xx2'",
        ),
        (["op", "dropout", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["op", "dropout", "--dropout", "1.5"], "dropout probability p must satisfy 0 <= p <= 1, got 1.5"),
        (
            ["op", "dropout", "model.dropout=1"],
            "unrecognized arguments: model.dropout=1; see fuselayers bench op --help",
        ),
        (
            ["model", "gpt_nano", "--activation", "relu"],
            "no option of fuselayers bench model '--activation'; there are: ",
        ),
        (
            ["model", "gpt_nano", "--shape", "4x9999"],
            "--shape must be sequences x tokens, with at most 128 tokens, got 4x9999",
        ),
        (["suite", "--out", "x", "--ops", "dropuot"], "no op of bench suite 'dropuot'; did you mean 'dropout'? there"),
        (["suite", "--out", "x", "--dtypes", "float64"], "no dtype of bench suite 'float64'; did you mean 'float16'"),
    ],
)
def test_bad_arguments_get_one_line_and_no_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = _bench(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fuselayers: ")
    assert text in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())
