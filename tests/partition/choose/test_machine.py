import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from fuselayers.partition import Machine, explain, machine_of
from fuselayers.partition.choose.machine import tuned_file, write_tuned

MINE = Machine(
    "measured", bandwidth=1e10, flop_rate=4e11, low_precision_flop_rate=8e11, vector_flop_rate=2e11, kernel_seconds=3e-6
)

SPEEDS = ["bandwidth", "flop_rate", "low_precision_flop_rate", "vector_flop_rate", "kernel_seconds"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))


def test_time_as_bytes() -> None:
    assert MINE.bytes_of_flops(4e11, itemsize=4) == 1e10  # one second
    assert MINE.bytes_of_flops(4e11, itemsize=8) == 1e10
    assert MINE.bytes_of_flops(4e11, itemsize=2) == 0.5e10
    assert MINE.bytes_of_kernel == pytest.approx(3e4)


@pytest.mark.parametrize("field", SPEEDS)
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_figure_must_be_above_zero(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{field} of a machine must be a finite number above 0, got {value}$"):
        dataclasses.replace(MINE, **{field: value})


def test_without_a_file_the_machine_is_stated_and_an_unknown_device_counts_as_a_gpu() -> None:
    assert machine_of("cpu").name == "stated: two cores with AVX-512"
    assert machine_of("cuda").name == "stated: NVIDIA H200"
    assert machine_of("xpu") is machine_of("cuda")


class TestTuned:
    def test_written_and_read_beside_other_devices_and_written_again(self, tmp_path: Path) -> None:
        other, faster = dataclasses.replace(MINE, name="other"), dataclasses.replace(MINE, bandwidth=2e10)
        path = tmp_path / "machines.json"
        assert write_tuned("cpu", MINE) == write_tuned("xpu", other) == path
        os.utime(path, ns=(1, 1))
        assert (machine_of("cpu"), machine_of("xpu")) == (MINE, other)
        assert machine_of("cuda").name == "stated: NVIDIA H200"
        write_tuned("cpu", faster)
        assert (machine_of("cpu"), machine_of("xpu")) == (faster, other)
        assert [*tmp_path.iterdir()] == [path]

    def test_is_named_with_its_file_in_explain(self, tmp_path: Path) -> None:
        x = torch.randn(8, requires_grad=True)
        assert explain(torch.sin, x).machine == "stated: two cores with AVX-512"
        write_tuned("cpu", MINE)
        assert explain(torch.sin, x).machine == f"measured, from {tmp_path / 'machines.json'}"

    def test_is_of_a_number_of_threads(self) -> None:
        threads = torch.get_num_threads()
        write_tuned("cpu", MINE)
        try:
            torch.set_num_threads(threads + 1)
            assert machine_of("cpu").name.startswith("stated")
        finally:
            torch.set_num_threads(threads)
        assert machine_of("cpu") == MINE

    def test_where(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert tuned_file() == tmp_path / "machines.json"
        monkeypatch.delenv("FUSELAYERS_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert write_tuned("cpu", MINE) == tmp_path / "cache" / "fuselayers" / "machines.json"
        assert machine_of("cpu") == MINE
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        assert tuned_file() == tmp_path / "home" / ".cache" / "fuselayers" / "machines.json"
        assert machine_of("cpu").name.startswith("stated")


HOSTILE = {
    "not json": "{",
    "not text": b"\xff\xfe\x00",
    "a field too many": json.dumps({"cpu": dataclasses.asdict(MINE) | {"code": "import os"}}),
    "a figure beyond floats": json.dumps({"cpu": dataclasses.asdict(MINE) | {"bandwidth": 10**400}}),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_damaged_file_is_not_used_with_a_warning(content: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "machines.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match=r"(?s)machines\.json was not written by fuselayers .+ not used"):
        assert machine_of("cpu").name.startswith("stated: ")


def test_a_file_that_cannot_be_reached_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path / "file" / "below"))
    assert machine_of("cpu").name.startswith("stated: ")
    monkeypatch.delenv("FUSELAYERS_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def nobodys() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobodys)
    assert machine_of("cpu").name.startswith("stated: ")
