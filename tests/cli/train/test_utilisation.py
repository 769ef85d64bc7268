import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from fuselayers.cli.train import utilisation
from fuselayers.cli.train.utilisation import Utilisation, data_sheet_peak, measured_matmul, utilisation_of
from fuselayers.configs import compose
from fuselayers.configs.costs import model_costs


@pytest.mark.parametrize(
    ("name", "bfloat16", "float32"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA H200", 989e12, 67e12),
        ("NVIDIA GH200 480GB", 989e12, 67e12),
        ("NVIDIA B200", 2250e12, 80e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("AMD Instinct MI300X", 1307e12, 163.4e12),
    ],
)
def test_the_peak_of_a_gpu_is_its_data_sheets(name: str, bfloat16: float, float32: float) -> None:
    assert data_sheet_peak(name, torch.bfloat16) == bfloat16
    assert data_sheet_peak(name, torch.float32) == float32


def test_tensor_float_32_has_its_own_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert data_sheet_peak("NVIDIA A100-SXM4-80GB", torch.float32) == 156e12


def test_an_unknown_gpu_has_none_and_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert data_sheet_peak("NVIDIA RTX 12345", torch.bfloat16) is None
    assert data_sheet_peak("NVIDIA H200 NVL", torch.bfloat16) is None  # not an H200, which is faster
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA RTX 12345")
    found = utilisation_of(compose("gpt_nano"), length=128, device=torch.device("cuda", 0))
    assert found.of(1000.0) is None
    assert found.source == "no model FLOPs utilisation: the peak of NVIDIA RTX 12345 is not known"


@pytest.mark.parametrize("length", [16, 128])
def test_on_a_cpu_it_is_the_share_of_a_measured_matmul(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(utilisation, "measured_matmul", lambda dtype, *, threads: 4e10)
    found = utilisation_of(compose("gpt_nano"), length=length, device=torch.device("cpu"))
    assert found.source == "MFU is the share of 40 GFLOP/s, the rate of a float32 matmul measured here"
    costs = model_costs("gpt_nano", [f"model.context_length={length}"])
    assert found.of(1000.0) == pytest.approx(1000 * (costs.forward_flops + costs.backward_flops) / length / 4e10)


def test_a_gpu_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    config = compose("gpt_nano", ["train.precision=bfloat16"])
    found = utilisation_of(config, length=128, device=torch.device("cuda", 0))
    assert found.peak == 989e12
    assert found.source == "MFU is the share of 989 TFLOP/s, the data sheet's of NVIDIA H200, bfloat16"


def test_a_model_that_cannot_be_counted_trains_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any) -> None:
        raise RuntimeError("a fake tensor has no values\nand more lines")

    monkeypatch.setattr(utilisation, "model_costs", fails)
    found = utilisation_of(compose("gpt_nano"), length=128, device=torch.device("cpu"))
    assert found == Utilisation(
        None, None, "no model FLOPs utilisation: the model cannot be counted: a fake tensor has no values"
    )
    assert found.of(1.0) is None
    assert replace(found, flops_per_token=1.0, peak=4.0).of(1.0) == 0.25


def test_the_rate_is_that_of_the_fastest_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each matmul is between two readings: 0.02 s, 0.01 s, 0.03 s, and then the time is up.
    readings = iter([0.0, 0.0, 0.02, 0.03, 0.04, 0.05, 0.08, 0.2])
    state = torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(readings))
        rate = measured_matmul.__wrapped__(torch.float32, threads=1)
    assert rate == pytest.approx(2 * 512**3 / 0.01)
    assert torch.equal(torch.get_rng_state(), state)
