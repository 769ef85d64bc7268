import io

import pytest
import torch
from rich.console import Console
from torch import Tensor

from fuselayers.cli.train.compare import Comparison, Side, compare, comparison_notes, comparison_table, plain_model
from fuselayers.configs import build, compose

_OVERRIDES = [
    "model.hidden_dim=32",
    "model.num_layers=2",
    "model.context_length=16",
    "attention.num_heads=2",
    "feedforward=fused_mlp",
    "fusion=off",
]
_CPU = torch.device("cpu")


def _batches(number: int) -> list[tuple[Tensor, Tensor]]:
    return [tuple(torch.randint(256, (2, 4, 16))) for _ in range(number)]  # type: ignore[misc]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_same_weights_same_masks_same_losses_and_nothing_changes(dropout: float) -> None:
    config = compose(overrides=[*_OVERRIDES, f"model.dropout={dropout}"])
    fused, batches = build(config).eval(), _batches(3)
    state = torch.get_rng_state()
    eager = plain_model(config, fused, device=_CPU)
    before = {name: tensor.clone() for name, tensor in fused.state_dict().items()}

    result = compare(eager, fused, batches, repeats=2, device=_CPU)

    assert type(eager.blocks[0].feedforward).__name__ == "MLP"  # type: ignore[index,union-attr]
    assert result.loss_difference < 1e-6
    assert (result.num_batches, result.tokens) == (3, 64)
    assert len(result.eager.seconds) == len(result.fused.seconds) == 2
    assert 0 < result.fused.saved_bytes <= result.eager.saved_bytes
    assert torch.equal(torch.get_rng_state(), state)
    assert not fused.training
    assert all(parameter.grad is None for parameter in fused.parameters())
    for name, tensor in fused.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_a_difference_is_found() -> None:
    """Weights that differ must show: a comparison that always says zero would be worth nothing."""
    config = compose(overrides=_OVERRIDES)
    fused = build(config)
    eager = plain_model(config, fused, device=_CPU)
    with torch.no_grad():
        dict(eager.named_parameters())["token.weight"].mul_(2)
    assert compare(eager, fused, _batches(2), repeats=1, device=_CPU).loss_difference > 1e-4


def test_the_table_shows_medians_and_ratios() -> None:
    comparison = Comparison(
        eager=Side((0.1, 9.0, 0.2), 4_000_000),
        fused=Side((0.1, 0.05, 0.1), 1_000_000),
        tokens=1000,
        loss_difference=1.25e-7,
        num_batches=8,
        conditions="a machine, 2 threads",
    )
    output = io.StringIO()
    Console(file=output, width=100).print(comparison_table(comparison))
    text = output.getvalue()
    for row in (
        ["tokens/s", "5,000", "10,000", "2.00 x"],
        ["saved for backward, MB per step", "4.0", "1.0", "0.25 x"],
    ):
        line = next(line for line in text.splitlines() if row[0] in line)
        assert [cell.strip() for cell in line.strip("│┃|").split("│")] == row
    assert comparison_notes(comparison) == [
        "losses differ by at most 1.2e-07 nats per byte on 8 batches",
        "forward + backward in training mode, medians of 3 each, in turns",
        "a machine, 2 threads",
    ]
