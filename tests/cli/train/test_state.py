from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuselayers import build
from fuselayers.cli.train.checkpoint import Content, save
from fuselayers.cli.train.state import load_state, state_of


class _Model(nn.Module):
    """A tied weight, a buffer, and a parameter that the forward does not use."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5)
        self.head.weight = self.embedding.weight
        self.unused = nn.Parameter(torch.randn(2))
        self.register_buffer("count", torch.tensor([3, 4]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens)).square().mean()


def _trained(model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.tensor([1, 2, 4])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def test_the_names_are_those_of_the_plain_model_however_it_is_wrapped() -> None:
    model = _Model()
    names = state_of(model, _trained(model)).keys()
    assert {"model.embedding.weight", "model.count", "optimizer.embedding.weight.exp_avg"} <= names
    compiled = torch.compile(model, backend="eager")
    assert state_of(compiled, _trained(compiled)).keys() == names
    small = ["model.num_layers=1", "model.hidden_dim=8", "attention.num_heads=2"]
    plain, fused = build("gpt_nano", [*small, "fusion=off"]), build("gpt_nano", small)
    of_plain, of_fused = (state_of(form, torch.optim.AdamW(form.parameters())).keys() for form in (plain, fused))
    assert of_plain == of_fused == {f"model.{name}" for name in plain.state_dict()}


def test_weights_of_another_architecture_are_refused_and_change_nothing(tmp_path: Path) -> None:
    saved = _Model()
    path = save(tmp_path, state_of(saved, _trained(saved)), Content(2))
    model = _Model(width=4)
    del model.unused
    model.other = nn.Parameter(torch.zeros(1))
    before = model.embedding.weight.clone()
    text = rf"^the checkpoint {path} has another architecture: .*; resume with the model it was trained with$"
    with pytest.raises(ValueError, match=text):
        load_state(model, torch.optim.AdamW(model.parameters()), path)
    assert torch.equal(model.embedding.weight, before)
