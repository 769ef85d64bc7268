"""Activation checkpointing with dropout: what backward computes again drops the elements that forward dropped."""

from typing import Literal

import pytest
import torch

from fuselayers.components.swap import swap

transformers = pytest.importorskip("transformers")

_IDS = torch.arange(64).reshape(4, 16) % 37


def _model(*, attention: float, residual: float) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 37, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, embd_pdrop=0.0, attn_pdrop=attention, resid_pdrop=residual)
    model: torch.nn.Module = transformers.GPT2LMHeadModel(config)
    return model.train()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("level", "attention", "residual"),
    [
        *(("layers", 0.5, 0.0), ("layers", 0.0, 0.5)),
        *(pytest.param("blocks", *one, marks=pytest.mark.slow) for one in ((0.5, 0.0), (0.0, 0.5))),
    ],
)
def test_gradients_are_those_of_the_loss(
    level: Literal["layers", "blocks"], attention: float, residual: float, reentrant: bool
) -> None:
    model = _model(attention=attention, residual=residual)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    swap(model, level=level, backend="eager", verify=False)
    parameters = list(model.parameters())
    generator = torch.Generator().manual_seed(1)
    directions = [torch.randn(one.shape, generator=generator) for one in parameters]

    def loss(step: float) -> torch.Tensor:
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.data.add_(direction, alpha=step)
        torch.manual_seed(7)
        value: torch.Tensor = model(input_ids=_IDS, labels=_IDS).loss
        for parameter, direction in zip(parameters, directions, strict=True):
            parameter.data.sub_(direction, alpha=step)
        return value

    found = torch.autograd.grad(loss(0.0), parameters) if not reentrant else _accumulated(loss(0.0), parameters)
    derivative = sum((one * direction).sum().item() for one, direction in zip(found, directions, strict=True))
    difference = (loss(1e-3) - loss(-1e-3)).item() / 2e-3
    assert derivative == pytest.approx(difference, rel=0.02, abs=0.02)


def _accumulated(loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    # Reentrant checkpointing knows backward() alone.
    loss.backward()
    return [one.grad for one in parameters if one.grad is not None]
