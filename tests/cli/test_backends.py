import pytest

from fuselayers.cli import backends as command
from fuselayers.cli.main import main
from fuselayers.partition import BackendStatus, backends


def test_shows_what_the_fusion_core_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends"]) == 0
    out = capsys.readouterr().out
    for status in backends():
        line = next(line for line in out.splitlines() if line.split()[0] == status.name)
        assert line.split()[1] == ("yes" if status.available else "no")


def test_says_why_one_is_missing_and_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status = BackendStatus("inductor", False, "no C++ compiler", "apt install g++")
    monkeypatch.setattr(command, "backends", lambda device: (status,))
    assert main(["backends"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row == "inductor  no         no C++ compiler; to get it: apt install g++"
