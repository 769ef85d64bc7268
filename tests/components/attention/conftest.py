import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex


@pytest.fixture
def flex_with_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let flex attention run backward on a CPU: torch's CPU kernel has no backward, but torch's formula has."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
