import json
import os
from pathlib import Path

import pytest
import torch

from fuselayers.cli.bench import command
from fuselayers.cli.main import main
from fuselayers.ops import dropout
from fuselayers.partition import BackendStatus

_TINY_MODEL = [
    "model.hidden_dim=16",
    "model.num_layers=1",
    "model.context_length=16",
    "attention.num_heads=2",
    "feedforward=fused_mlp",
]


def _bench(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["bench", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_times_an_op_in_its_plain_its_eager_and_its_compiled_form(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    arguments = ["op", "bias_activation_dropout", "--shape", "4x32", "--repeats", "3"]
    code, out, err = _bench(capsys, *arguments, "--backends", "eager,inductor", "--json", str(path))
    assert (code, err) == (0, "")
    assert "op bias_activation_dropout: x [4, 32] bias [32], activation gelu, p 0.1, float32" in out
    assert f"torch {torch.__version__}" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if " x" in line and "%" in line}
    assert list(rows) == ["plain", "eager", "inductor"]
    assert rows["plain"][3:5] == ["1.00", "x"]
    content = json.loads(path.read_text())
    assert content["wrong"] == {}
    for name, row in rows.items():
        times = content["seconds"][name]
        assert len(times["forward"]) == len(times["forward_backward"]) == 3
        assert float(row[1]) == pytest.approx(sorted(times["forward"])[1] * 1e3, abs=1e-3)


def test_overhead_is_the_hosts_time_beside_plain_pytorchs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, threads = tmp_path / "overhead.json", torch.get_num_threads()
    code, out, _ = _bench(capsys, "op", "layer_norm", "--overhead", "--repeats", "3", "--json", str(file))
    assert code == 0
    assert "layer_norm of 2x4x64 float32, host time of a call" in out
    assert torch.get_num_threads() == threads
    seconds = json.loads(file.read_text())["seconds"]
    assert list(seconds) == ["plain", "fuselayers"]
    for spans in seconds.values():
        assert [len(readings) for readings in spans.values()] == [3, 3]
        assert 0 < min(spans["forward"]) < min(spans["forward + backward"]) < 0.01
    row = next(line for line in out.splitlines() if "forward " in line and "backward" not in line)
    assert f"{sorted(seconds['fuselayers']['forward'])[1] * 1e6:.1f}" in row


@pytest.mark.slow
def test_the_first_step_of_a_compiled_model_is_slow_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, folder = tmp_path / "model.json", os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    arguments = ["model", "gpt_nano", *_TINY_MODEL, "--shape", "2x16", "--repeats", "1", "--json", str(file)]
    code, out, _ = _bench(capsys, *arguments, "--backends", "eager,inductor,torch.compile")
    assert code == 0
    assert "first step, cold / warm" in out
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == folder
    first = json.loads(file.read_text())["first_step"]
    assert list(first) == ["inductor", "torch.compile"]
    for cold, warm in first.values():
        assert 0 < warm < cold


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_times_a_model(capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    arguments = ["model", "gpt_nano", *_TINY_MODEL, "--shape", "2x16", "--dropout", "0.2", "--repeats", "2"]
    code, out, err = _bench(capsys, *arguments, "--backends", "eager", "--dtype", dtype)
    assert (code, err) == (0, "")
    assert "model gpt_nano: 7,664 parameters, fused_mlp, 2 x 16 tokens, " + dtype in out
    assert [line.split()[0] for line in out.splitlines() if "%" in line] == ["plain", "eager"]


def test_wrong_numbers_are_not_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuselayers.cli.bench.cases.ops.dropout", lambda x, p: dropout(x, p) * 1.001)
    code, out, _ = _bench(capsys, "op", "dropout", "--shape", "4x32", "--repeats", "2", "--backends", "eager,inductor")
    assert code == 1
    for name in ("eager", "inductor"):
        assert f"{name} is not timed, its numbers are wrong: output 0 is off by" in out
    assert [line.split()[0] for line in out.splitlines() if "%" in line] == ["plain"]


def test_parts_of_an_op_that_drops(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "parts.json"
    arguments = ("--shape", "4x32", "--repeats", "3", "--dropout", "0.5", "--parts", "--json", str(file))
    code, out, _ = _bench(capsys, "op", "bias_dropout_residual", *arguments)
    assert code == 0
    assert "bias_dropout_residual of 4x32 float32, forward, dropout 0.5" in out
    seconds = json.loads(file.read_text())["seconds"]
    assert {name: len(taken) for name, taken in seconds.items()} == {
        "the op": 3,
        "its mask": 3,
        "without dropout": 3,
        "a copy of x": 3,
    }
    # The unit of the table is nanoseconds per element: 128 of them here.
    row = next(line.split() for line in out.splitlines() if "its mask" in line)
    median = sorted(seconds["its mask"])[1]
    assert float(row[-1].strip("│|")) == pytest.approx(median / 128 * 1e9, abs=0.001)


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
    assert [line.split()[0] for line in out.splitlines() if "%" in line] == ["plain", "eager"]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["opp", "dropout"], "no subject of bench 'opp'; did you mean 'op'? there are: model, op"),
        (["op", "dropuot"], "no op 'dropuot'; did you mean 'dropout'?"),
        (["model", "gpt_namo"], "no model 'gpt_namo'; did you mean 'gpt_nano'?"),
        (
            ["op", "dropout", "--shape", "8xx2"],
            "--shape must be sizes above 0 with x between them, as 8x256x512, got '8xx2'",
        ),
        (["op", "dropout", "--shape", "8x0"], "--shape must be sizes above 0"),
        (["op", "dropout", "--dtype", "float31"], "no dtype 'float31'; did you mean 'float32'?"),
        (["op", "dropout", "--backends", "inducter"], "no backend 'inducter'; did you mean 'inductor'?"),
        (["op", "dropout", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["op", "dropout", "--repeats", "two"], "argument --repeats: invalid int value: 'two'"),
        (["op", "dropout", "--dropout", "1.5"], "dropout probability p must satisfy 0 <= p <= 1, got 1.5"),
        (
            ["op", "dropout", "--device", "toaster"],
            "--device must be auto, cpu or a GPU that torch can use, got 'toaster'",
        ),
        (
            ["op", "dropout", "model.dropout=1"],
            "unrecognized arguments: model.dropout=1; see fuselayers bench op",
        ),
        (
            ["model", "gpt_nano", "--activation", "relu"],
            "no option of fuselayers bench model '--activation'; there are: ",
        ),
        (["model", "gpt_nano", "--shape", "4x9999"], "a model's --shape must be sequences x tokens, with at most"),
        (["op"], "the following arguments are required: OP; see fuselayers bench op --help"),
        (["op", "dropout", "--parts", "--overhead"], "--overhead and --parts are two measurements; ask for one"),
        (["op", "dropout", "--parts", "--backends", "eager"], "--parts times the op as it is called; leave --backends"),
        (["op", "dropout", "--parts", "--dropout", "0"], "--parts needs an op that drops; pass --dropout 0.1, got 0"),
        (["op", "rms_norm", "--parts", "--dropout", "0.1"], "--parts needs an op with dropout; rms_norm has none"),
    ],
)
def test_bad_arguments_get_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    code, out, err = _bench(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("fuselayers: ")
    assert text in err
    assert err.count("\n") == 1
