import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuselayers import __version__
from fuselayers.cli import backends
from fuselayers.cli.main import main
from fuselayers.partition import BackendUnavailableError, FallbackWarning
from tests.processes import run


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fuselayers {__version__}\n"
    for arguments in ([], ["--help"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        assert all(f"\n    {name} " in out for name in ("train", "list", "bench", "backends"))


def test_the_answers_that_need_no_torch_import_none() -> None:
    program = """
import sys
from fuselayers.cli.main import main
codes = [main(arguments) for arguments in (["--version"], ["--help"], [], ["trian"], ["--verzion"])]
assert codes == [0, 0, 0, 2, 2], codes
heavy = {"torch", "numpy", "hydra", "matplotlib", "networkx"} & set(sys.modules)
assert not heavy, heavy
"""
    # Not by `run`, whose processes have imported torch.
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_help_of_train_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for name in ("train.steps", "train.resume", "train.precision", "data.path", "data.held_out"):
        assert f"  {name} " in out
    assert "updates of the weights" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["trian"],
            "no command 'trian'; did you mean 'train'? there are: backends, bench, explain, export, list",
        ),
        (["backends", "--devise", "cpu"], "no option of fuselayers backends '--devise'; did you mean '--device'?"),
        (["--verzion"], "no option of fuselayers '--verzion'; did you mean '--version'?"),
        (
            ["bench"],
            "the following arguments are required: SUBJECT; see fuselayers bench --help",
        ),
        (["train", "feedforwrd=mlp"], "no config group 'feedforwrd'; did you mean 'feedforward'?"),
        (["train", "data.path=/nowhere"], "cannot read the text: there is no /nowhere; set data.path="),
    ],
)
def test_bad_input_gets_one_line_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"fuselayers: {text}")
    assert captured.err.count("\n") == 1


def _fails(error: BaseException) -> object:
    def run(arguments: object, console: object) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (PermissionError(13, "Permission denied", "/a/file"), 2, "Permission denied: /a/file"),
        (BackendUnavailableError("no backend could compile this"), 2, "no backend could compile this"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
)
def test_an_error_that_is_no_bug_gets_one_line(
    error: BaseException, code: int, text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "run", _fails(error))
    assert main(["backends"]) == code
    assert capsys.readouterr().err == f"fuselayers: {text}\n"


def test_a_bug_keeps_its_traceback_and_bad_input_gets_one_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "run", _fails(AssertionError("ours")))
    with pytest.raises(AssertionError, match="ours"):
        main(["backends"])
    with pytest.raises(ValueError, match="no kind 'nrom'"):
        main(["--traceback", "list", "nrom"])


@pytest.mark.parametrize("fail", [lambda: torch.empty(1 << 50), lambda: bytearray(1 << 60)], ids=["torch", "Python"])
def test_want_of_memory_is_no_bug(
    fail: Callable[[], object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "run", lambda arguments, console: fail())
    assert main(["backends"]) == 2
    assert re.match(r"fuselayers: out of memory: .*; choose smaller sizes\n$", capsys.readouterr().err)


def test_a_long_argument_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["x" * 9000], ["backends", "--" + "x" * 9000], ["train", "data.path=/" + "x" * 9000]):
        assert main(arguments) == 2
        assert len(capsys.readouterr().err) < 600


def test_a_fallback_is_said_in_one_line_and_other_warnings_as_always(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(arguments: object, console: object) -> int:
        warnings.warn("backend 'inductor' is not used: no compiler", FallbackWarning, stacklevel=1)
        warnings.warn("something else", UserWarning, stacklevel=1)
        return 0

    monkeypatch.setattr(backends, "run", warn)
    with pytest.warns(UserWarning, match="something else") as seen:
        assert main(["backends"]) == 0
    assert capsys.readouterr().err == "fuselayers: backend 'inductor' is not used: no compiler\n"
    assert [str(warning.message) for warning in seen] == ["something else"]


def test_a_reader_that_has_enough_gets_no_traceback() -> None:
    program = """
import os, sys
from fuselayers.cli.main import main
reads, writes = os.pipe()
os.close(reads)
os.dup2(writes, sys.stdout.fileno())
code = main(["list"])
sys.stdout.flush()
sys.exit(code)
"""
    done = run(program)
    assert (done.code, done.errors) == (1, "")


def test_output_without_the_letters_of_a_table_does_not_end_a_run(
    tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    program = """
import io, sys
from fuselayers.cli.main import main
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="ascii")
sys.exit(main(sys.argv[1:]))
"""
    folder = tmp_path / "r\N{LATIN SMALL LETTER U WITH DIAERESIS}n"
    asked = ["feedforward=fused_mlp", "train.sample_bytes=40", "train.compare=true", f"train.output='{folder}'"]
    done = run(program, "train", *tiny, *asked)
    assert (done.code, done.errors) == (0, "")
    assert f"writing {tmp_path}/r\\xfcn" in " ".join(done.printed.split())  # a long path has a line of its own
    assert re.search(r"^fused  ", done.printed, re.MULTILINE)
