"""Over 30 steps, a swapped model has the losses of the plain model, to the rounding of float32."""

import pytest
import torch
from torch import nn

from tests.components.swap.levels import LEVELS, pair
from tests.components.swap.models import batch_for, loss_of

STEPS = 30
LONG = ("gpt2", "bert", "llama", "qwen3", "gemma", "phi3", "vit", "t5")


def losses(model: nn.Module, name: str) -> torch.Tensor:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batch, kept = batch_for(name), []
    for step in range(STEPS):
        if "input_ids" in batch:
            # Consecutive tokens, which can be learnt. Each step has a new batch, and lengths change.
            starts = torch.randint(96, (2, 1), generator=torch.Generator().manual_seed(step))
            ids = (starts + torch.arange(8 + step % 5)) % 96 + 3
            batch = {"input_ids": ids, "labels": ids}
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss.detach())
    return torch.stack(kept)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        pytest.param(
            *(name, level), marks=() if level == "layers" and name in ("gpt2", "bert", "phi3") else pytest.mark.slow
        )
        for name in LONG
        for level in LEVELS
    ],
)
def test_thirty_steps(name: str, level: str) -> None:
    plain, swapped = pair(name, level)
    wanted, got = losses(plain, name), losses(swapped, name)
    # The rounding errors of the steps add up.
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=2e-5)
    assert wanted[-5:].mean() < wanted[:5].mean()
