from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fuselayers import build
from fuselayers.cli.train.checkpoint import load_state, read_checkpoint, save, state_of


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


def _trained(model: nn.Module, *, steps: int = 2) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.tensor([1, 2, 4])).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _saved(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda state: None, *, step: int = 2) -> Path:
    model = _Model()
    optimizer = _trained(model)
    state = {name: tensor.clone() for name, tensor in state_of(model, optimizer).items()}
    change(state)
    return save(folder, state, step=step)


def _load(path: Path, model: nn.Module) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, weight_decay=0.25)
    load_state(model, optimizer, read_checkpoint(path), path=path)
    return optimizer


def test_a_new_model_goes_on_as_the_saved_one(tmp_path: Path) -> None:
    model = _Model()
    optimizer = _trained(model)
    path = save(tmp_path, state_of(model, optimizer), step=2)
    other = _Model()
    loaded = _load(path, other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name
    assert other.head.weight is other.embedding.weight
    wanted = optimizer.state_dict()["state"]
    got = loaded.state_dict()["state"]
    # The parameter that is not used has no state, as before.
    assert got.keys() == wanted.keys() == {1, 2}
    for index, entry in wanted.items():
        assert all(torch.equal(tensor, got[index][key]) for key, tensor in entry.items())
    assert [loaded.param_groups[0][key] for key in ("lr", "weight_decay")] == [0.5, 0.25]
    tokens = torch.tensor([3])
    losses = []
    for one, its in ((model, optimizer), (other, loaded)):
        its.param_groups[0].update(lr=0.1, weight_decay=0.01)
        for _ in range(2):
            loss = one(tokens)
            loss.backward()
            its.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]


def test_the_names_are_those_of_the_plain_model_however_it_is_wrapped() -> None:
    model = _Model()
    names = state_of(model, _trained(model)).keys()
    assert {"model.embedding.weight", "model.count", "optimizer.embedding.weight.exp_avg"} <= names
    compiled = torch.compile(model, backend="eager")
    assert state_of(compiled, _trained(compiled)).keys() == names
    plain = build("gpt_nano", ["model.num_layers=1", "model.hidden_dim=8", "attention.num_heads=2", "fusion=off"])
    fused = build("gpt_nano", ["model.num_layers=1", "model.hidden_dim=8", "attention.num_heads=2"])
    of_plain, of_fused = (state_of(one, torch.optim.AdamW(one.parameters())).keys() for one in (plain, fused))
    assert of_plain == of_fused == {f"model.{name}" for name in plain.state_dict()}


def test_a_state_without_steps_is_saved_and_loaded(tmp_path: Path) -> None:
    model = _Model()
    optimizer = _trained(model, steps=0)
    path = save(tmp_path, state_of(model, optimizer), step=0)
    assert optimizer.state_dict()["state"] == {}
    other = _Model()
    assert _load(path, other).state_dict()["state"] == {}
    assert torch.equal(other.unused, model.unused)


def test_weights_of_another_architecture_are_refused_and_change_nothing(tmp_path: Path) -> None:
    path = _saved(tmp_path)
    model = _Model(width=4)
    del model.unused
    model.other = nn.Parameter(torch.zeros(1))
    before = model.embedding.weight.clone()
    text = (
        rf"^the checkpoint {path} is of another architecture: it lacks other; it has unused, which the model does not; "
        r"embedding\.weight is \[5, 3\] there and \[5, 4\] in the model \(and 1 more\); resume with the model it was"
    )
    with pytest.raises(ValueError, match=text):
        _load(path, model)
    assert torch.equal(model.embedding.weight, before)
    with pytest.raises(
        ValueError, match=r"embedding\.weight is torch\.float32 there and torch\.float64 in the model; h"
    ):
        _load(path, _Model().double())


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("model.head.bias", math.nan, r"its head\.bias holds a NaN or an infinity"),
        ("model.unused", -math.inf, r"its unused holds a NaN or an infinity"),
        ("optimizer.head.bias.exp_avg", math.inf, r"its optimizer\.head\.bias\.exp_avg holds a NaN or an infinity"),
        ("optimizer.head.bias.exp_avg_sq", -1.0, r"its optimizer\.head\.bias\.exp_avg_sq is below 0"),
        ("optimizer.head.bias.step", math.nan, r"its optimizer\.head\.bias\.step holds a NaN or an infinity"),
        ("optimizer.head.bias.step", -2.0, r"its optimizer\.head\.bias\.step is below 0"),
    ],
)
def test_a_number_that_cannot_be_continued_from_is_named(tmp_path: Path, name: str, value: float, text: str) -> None:
    path = _saved(tmp_path, lambda state: state[name].view(-1)[-1:].fill_(value))
    with pytest.raises(ValueError, match=rf"^the checkpoint {path} cannot be continued: {text}$"):
        _load(path, _Model())


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.pop("optimizer.head.bias.exp_avg"),
        lambda state: state.update({"optimizer.head.bias.exp_avg": torch.zeros(2)}),
        lambda state: state.update({"optimizer.head.bias.exp_avg": torch.zeros(5, dtype=torch.float64)}),
        lambda state: state.update({"optimizer.head.bias.other": torch.zeros(5)}),
        lambda state: state.update({"optimizer.other.step": torch.zeros(())}),
        lambda state: [state.pop(name) for name in list(state) if name.startswith("optimizer.")],
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object]
) -> None:
    path = _saved(tmp_path, change)
    text = (
        rf"^the checkpoint {path} cannot be continued: its optimizer must hold AdamW's state of the model's "
        r"parameters, in their shapes$"
    )
    with pytest.raises(ValueError, match=text):
        _load(path, _Model())
