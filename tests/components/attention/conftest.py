import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex


@pytest.fixture
def flex_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flex attention's formula run backward on a CPU: torch has it, and only its kernel for CPUs has none."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
