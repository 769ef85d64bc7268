"""The definitions of the library's ops are those on file, and those on file can be made again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.partition.compilers.nvfuser import replay_goldens
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.library import GOLDEN
from tests.partition.compilers.nvfuser.replay_goldens import GOLDENS, digest_of, main
from tests.partition.compilers.nvfuser.write_goldens import golden_of


def test_each_op_has_a_file() -> None:
    assert {path.stem for path in GOLDENS.glob("*.py")} == set(GOLDEN)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_translation_is_the_one_on_file(name: str, as_on_the_gpu: StandIn) -> None:
    assert golden_of(name, GOLDEN[name], as_on_the_gpu) == (GOLDENS / f"{name}.py").read_text(), (
        "if the change is meant, run python -m tests.partition.compilers.nvfuser.write_goldens, and read what changed"
    )


def test_what_the_real_one_printed_is_on_file() -> None:
    names = {f"{path.stem}.{name}.txt" for path in GOLDENS.glob("*.py") for name in replay_goldens.regions_of(path)}
    versions = [*(GOLDENS / "printed").iterdir()]
    assert versions
    for version in versions:
        assert {one.name for one in version.iterdir()} == names
        for one in version.iterdir():
            golden = GOLDENS / f"{one.name.partition('.')[0]}.py"
            assert one.read_text().endswith(f"of {golden.name} {digest_of(golden)}\n"), (
                "it was printed of another definition; make test-nvfuser ARGS=--write"
            )


@pytest.mark.parametrize("name", [name for name, case in GOLDEN.items() if case.drops])
def test_what_drops_in_whole_groups_is_one_kernel(name: str) -> None:
    """By what the real one said, of shapes that are known: a mask that it would make in a kernel of its own would go
    through the memory. Where a group is cut off it makes several, and of rows that change."""
    kept = [*(GOLDENS / "printed").glob(f"*/{name}.*.txt")]
    assert len(kept) >= 2
    assert all("\none kernel by: none\n" not in one.read_text() for one in kept)


@pytest.mark.parametrize("name", [name for name, case in GOLDEN.items() if case.drops])
def test_a_mask_is_made_where_it_is_used(name: str) -> None:
    """No mask comes from outside: a seed does, from the GPU, and what is dropped is reckoned from it."""
    text = (GOLDENS / f"{name}.py").read_text()
    assert "dtype=DataType.Int)\n" in text.partition("fd.ops.")[0]
    assert "is_cpu=True" not in text
    assert "bitwise_xor" in text


def test_the_files_can_be_replayed(
    nvfuser_stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nvfuser_stand_in.scalars_pretend = True
    stored = ["--stored", str(tmp_path)]
    assert main([*stored, "--write"]) == 0
    assert set(capsys.readouterr().err.splitlines()) == {
        f"{path.stem}.{name}: ok" for path in GOLDENS.glob("*.py") for name in replay_goldens.regions_of(path)
    }
    printed = (tmp_path / nvfuser_stand_in.version() / "residual_layer_norm.forward_0.txt").read_text()
    assert "fd.ops.rsqrt(" in printed
    assert "\n\none kernel by: none\nof residual_layer_norm.py " in printed
    assert main([*stored, "softmax"]) == 0
    (kept,) = (tmp_path / nvfuser_stand_in.version()).glob("softmax.forward_0.txt")
    kept.write_text("another print\n")
    capsys.readouterr()
    assert main([*stored, "softmax"]) == 1
    assert f"softmax.forward_0: is printed otherwise than in {kept}" in capsys.readouterr().err


def test_that_nothing_is_stored_is_said(
    nvfuser_stand_in: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--stored", str(tmp_path), "softmax"]) == 1
    said = f"has nothing stored for version {nvfuser_stand_in.version()}; --write stores what is printed"
    assert f"softmax.forward_0: {said}\n" in capsys.readouterr().err


def test_a_result_that_is_off_is_said(
    nvfuser_stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Off(nvfuser_stand_in.FusionDefinition):  # type: ignore[name-defined,misc]
        def execute(self, *args: object, **kwargs: object) -> list[torch.Tensor]:
            return [one + 1 for one in super().execute(*args, **kwargs)]

    monkeypatch.setattr(nvfuser_stand_in, "FusionDefinition", Off)
    assert main(["--stored", str(tmp_path), "--write", "softmax"]) == 1
    assert "softmax.forward_0: is off by 1" in capsys.readouterr().err
