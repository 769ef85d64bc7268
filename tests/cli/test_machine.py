import platform

import pytest
import torch

from fuselayers.cli.machine import choose_device, describe_machine


def test_names_what_a_number_depends_on() -> None:
    text = describe_machine(torch.device("cpu"))
    assert text.endswith(f"torch {torch.__version__}, Python {platform.python_version()}")
    threads = torch.get_num_threads()
    assert f", {threads} thread" in text
    assert len(text.split(",")[0]) > 2


def test_auto_is_a_gpu_where_torch_can_use_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", setting="--device") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto", setting="--device") == torch.device("cuda")


@pytest.mark.parametrize("name", ["toaster", "cuda:99", ""])
def test_a_device_that_cannot_be_used_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--device must be auto, cpu or a GPU that torch can use, got '{name}'"):
        choose_device(name, setting="--device")
