from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fuselayers.cli.bench import expected as module
from fuselayers.cli.bench.cases import Settings
from fuselayers.cli.bench.expected import add_expected, arch_of, expected_seconds
from fuselayers.cli.bench.suite import Measured, Suite, Variant
from fuselayers.cli.lint_kernels.cases import CASES, ROWS
from fuselayers.cli.lint_kernels.figures import expected_of
from tests.cli.lint_kernels.kernels import compiles


@compiles
def test_a_call_of_the_suite_takes_what_the_lint_says() -> None:
    (case,) = (case for case in CASES if case.title == "residual_rms_norm 4096 bfloat16")
    settings = Settings(
        (2, ROWS // 2, 4096), dropout=0.0, activation="gelu", dtype=torch.bfloat16, device=torch.device("cuda")
    )
    forward, both = expected_of(case, "sm_90").seconds
    assert expected_seconds(case.op, settings, "sm_90") == {"forward": forward, "forward_backward": both}
    assert expected_seconds(case.op, settings, "sm_120") == {}  # the model does not know it


@pytest.mark.parametrize(
    ("hip", "properties", "arch"),
    [
        (None, {"major": 9, "minor": 0}, "sm_90"),
        ("6.4", {"gcnArchName": "gfx942:sramecc+:xnack-"}, "gfx942"),
    ],
)
def test_the_name_of_an_architecture(
    hip: str | None, properties: dict[str, Any], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**properties))
    assert arch_of(torch.device("cuda")) == arch


def test_rows_of_the_librarys_kernels_get_what_is_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"forward": 32e-6, "forward_backward": 64e-6}

    def seconds(op: str, settings: Settings, arch: str) -> dict[str, float] | None:
        assert (op, settings.shape, settings.dtype, settings.dropout) == ("dropout", (2, 3, 8), torch.bfloat16, 0.1)
        assert (arch, settings.device.type) == ("sm_90", "meta")
        return found

    def ahead(calls: Sequence[Callable[[], Any]], *, workers: int, seconds: float) -> list[Any]:
        assert (workers, seconds) == (4, 9.0)
        return [calls[0](), None]  # there was no time for the second

    monkeypatch.setattr(module, "expected_seconds", seconds)
    monkeypatch.setattr(module, "run_ahead", ahead)

    def row(candidate: str, floor: dict[str, int]) -> Measured:
        return Measured("dropout", (2, 3, 8), "bfloat16", candidate, {}, None, 0, floor)

    moved = {"forward": 96, "forward_backward": 192}
    suite = Suite(1.0, rows=[row("eager", moved), row("fuselayers", moved), row("fuselayers", moved)])
    # Memory does not limit it: the model knows nothing of a matmul.
    suite.rows.append(row("fuselayers", {}))
    add_expected(suite, [Variant("dropout", "", {"dropout": 0.1})], arch="sm_90", workers=4, seconds=9.0)
    assert [one.expected for one in suite.rows] == [{}, found, {}, {}]
