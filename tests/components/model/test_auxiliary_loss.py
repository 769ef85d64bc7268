import re

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fuselayers.components import Choice, Decoder, Encoder
from fuselayers.configs import build, compose
from fuselayers.partition import FusedModule
from tests.components.compare import assert_same_step

TOKENS = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 0]])
TARGETS = TOKENS.roll(-1, 1)


def model(kind: type = Decoder, **options: object) -> nn.Module:
    torch.manual_seed(2)
    mixture = {"num_experts": 3, "balance_coefficient": 0.5, "z_coefficient": 0.1, **options}
    return kind(
        vocab_size=10,
        hidden_dim=8,
        num_layers=2,
        context_length=6,
        attention=Choice("multi_head", {"num_heads": 2}),
        feedforward=Choice("mixture_of_experts", mixture),
    )


def by_hand(plain: nn.Module) -> Tensor:
    """The loss of the logits plus those of the routers, which `test_mixture_of_experts` compares with their formula."""
    loss = nn.functional.cross_entropy(plain(TOKENS).flatten(0, 1), TARGETS.flatten())
    first, second = (block.feedforward.auxiliary_loss for block in plain.blocks)
    assert first > 0.5
    return loss + first + second


@pytest.mark.parametrize("kind", [Decoder, Encoder])
def test_the_layers_losses_are_added_in_training_only(kind: type) -> None:
    plain = model(kind)
    torch.testing.assert_close(plain(TOKENS, TARGETS), by_hand(plain))
    plain.eval()
    logits = plain(TOKENS)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), TARGETS.flatten())
    torch.testing.assert_close(plain(TOKENS, TARGETS), expected)
    assert plain.auxiliary_loss() is None


def built(scope: str, **options: object) -> nn.Module:
    config = compose(
        {
            "model": {"num_layers": 1, "vocab_size": 10, "hidden_dim": 8, "context_length": 6, "dropout": 0.0},
            "attention": {"num_heads": 2},
            "feedforward": {"name": "mixture_of_experts", "num_experts": 2, "balance_coefficient": 0.5, **options},
            "fusion": {"scope": scope, "backend": "eager"},
        }
    )
    return build(config)


@pytest.mark.parametrize(
    ("scope", "options"),
    [
        ("block", {}),
        pytest.param("model", {"capacity_factor": 0.8}, marks=pytest.mark.slow),
        pytest.param("block", {"capacity_factor": 0.8}, marks=pytest.mark.slow),
        pytest.param("model", {}, marks=pytest.mark.slow),
    ],
)
def test_at_every_scope_it_is_the_same_step(scope: str, options: dict[str, object]) -> None:
    plain, fused = built("none", **options), built(scope, **options)
    fused.load_state_dict(plain.state_dict())
    assert any(isinstance(module, FusedModule) for module in fused.modules())
    assert_same_step(plain, fused, TOKENS, TARGETS)
    torch.testing.assert_close(fused.auxiliary_loss(), plain.auxiliary_loss())
    assert plain.auxiliary_loss() > 0.5


def checkpointed(plain: nn.Module, *, use_reentrant: bool) -> nn.Module:
    for block in plain.blocks:
        run = block.forward
        block.forward = lambda x, run=run, **_: checkpoint(run, x, use_reentrant=use_reentrant)
    return plain


def test_a_loss_that_was_computed_without_a_graph_is_refused() -> None:
    assert_same_step(model(), checkpointed(model(), use_reentrant=False), TOKENS, TARGETS)
    plain = checkpointed(model(), use_reentrant=True)
    text = (
        "the auxiliary loss of blocks.0.feedforward has no gradient: it was computed without a graph, as "
        "checkpoint(use_reentrant=True) does; use use_reentrant=False"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        plain(TOKENS, TARGETS)
    with torch.no_grad():
        torch.testing.assert_close(plain(TOKENS, TARGETS), by_hand(model()))
