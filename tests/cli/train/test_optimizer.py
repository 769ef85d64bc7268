from dataclasses import replace

import pytest
import torch
from torch import nn

from fuselayers.cli.train.optimizer import build_optimizer, learning_rate
from fuselayers.configs import compose


def test_the_rate_warms_up_to_its_peak_and_ends_at_its_minimum() -> None:
    config = replace(compose().train, steps=100, warmup_steps=10, learning_rate=1.0, min_learning_rate=0.1)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert learning_rate(55, config) == pytest.approx(0.55)


def test_weight_decay_pulls_matrices_and_nothing_else() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    model[0].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    config = replace(compose().train, learning_rate=0.1, min_learning_rate=0.0, weight_decay=0.5)
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    after = model.state_dict()
    torch.testing.assert_close(after["1.weight"], before["1.weight"] * 0.95)
    for name in ("0.weight", "1.bias", "2.weight", "2.bias"):
        assert torch.equal(after[name], before[name]), name
