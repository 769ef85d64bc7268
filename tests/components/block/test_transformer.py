import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers import build, fuse
from fuselayers.components import Choice, Encoder, TransformerBlock
from tests.components.compare import randomise
from tests.components.registered import registered
from tests.selection import every_value

HEADS = Choice("multi_head", {"num_heads": 2})


class Looking(nn.Module):
    """Returns a mean of its input or memory, so that a test sees which values reached it."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_dim))

    def forward(self, x: Tensor, *, memory: Tensor | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        seen = x if memory is None else memory
        shares = torch.ones(seen.shape[:2]) if key_padding_mask is None else key_padding_mask.float()
        mean = (seen * shares[..., None]).sum(1, keepdim=True) / shares.sum(1)[:, None, None]
        return (mean * self.weight).expand_as(x)


@pytest.fixture(autouse=True)
def _looking() -> object:
    with registered("attention", looking=Looking):
        yield


def test_the_cross_attention_stands_between_the_two_and_looks_at_the_memory() -> None:
    block = randomise(TransformerBlock(8, attention="looking", cross_attention="looking", causal=False)).double()
    x, memory = torch.randn(2, 5, 8).double(), torch.randn(2, 3, 8).double()
    real_BS = torch.tensor([[True, True, False], [True, True, True]])
    order: list[str] = []
    for name in ("attention", "cross_attention", "feedforward"):
        getattr(block, name).register_forward_hook(lambda *_, name=name: order.append(name))
    y = block(x, memory=memory, memory_padding_mask=real_BS)
    assert order == ["attention", "cross_attention", "feedforward"]

    looked = [
        lambda n: block.attention(n),
        lambda n: (
            block.cross_attention.weight * torch.stack((memory[0, :2].mean(0), memory[1].mean(0)))[:, None]
            + torch.zeros_like(n)
        ),
        block.feedforward,
    ]
    torch.testing.assert_close(y, block.residual(x, looked))


# Without its mask a mixture that compares tokens would let padding displace real tokens.
MIXED = Choice("mixture_of_experts", {"gating": "expert_choice", "num_experts": 2, "top_k": 1})


@pytest.mark.parametrize(
    ("block", "wrap", "feedforward"),
    every_value(("transformer", "reversible"), (None, fuse, torch.compile), (Choice("conv_mlp"), MIXED)),
)
def test_a_feedforward_is_told_of_padding(block: str, wrap: Callable[..., Any] | None, feedforward: Choice) -> None:
    sizes = {"vocab_size": 9, "hidden_dim": 8, "num_layers": 2, "context_length": 6, "init_std": 0.5}
    model = Encoder(**sizes, attention=HEADS, feedforward=feedforward, block=block, residual="pre").eval()
    if wrap is not None:
        for layer in model.blocks:
            layer.feedforward = wrap(layer.feedforward, backend="eager")
    real_BT = torch.tensor([[True, True, True, True, False, False]] * 8)
    tokens_BT, other_BT = torch.randint(9, (2, 8, 6))
    other_BT = torch.where(real_BT, tokens_BT, other_BT)
    ours, others = (model(tokens, key_padding_mask=real_BT)[real_BT] for tokens in (tokens_BT, other_BT))
    assert torch.equal(ours, others)
    assert not torch.allclose(model(tokens_BT)[real_BT], ours, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"attention": "multi_head"}, "attention 'multi_head' needs the option 'num_heads' (number of query heads.)"),
        (
            {"attention": "looking", "causal": True},
            "attention 'looking' cannot hide the tokens that follow, which a causal model needs; those that can: ",
        ),
    ],
)
def test_errors(arguments: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        TransformerBlock(8, **{"attention": HEADS, **arguments})  # type: ignore[arg-type]


class NoResidual(nn.Module):
    def __init__(self, hidden_dim: int, *, start: float = 1e-4, dropout: float = 0.0) -> None:
        super().__init__()


@pytest.mark.parametrize("kind", ["residual", "position"])
def test_a_class_without_the_base_of_its_kind(kind: str) -> None:
    with registered(kind, mine=NoResidual):
        text = f"{kind} 'mine' ({NoResidual.__module__}.NoResidual) must be a subclass of components.{kind.title()}"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            build("gpt_nano", [f"{kind}=mine", "fusion=off"])


def test_a_block_refuses_inputs_that_its_parts_do_not_take() -> None:
    memory = torch.ones(1, 3, 8)
    block = TransformerBlock(8, attention="looking", causal=False)
    with pytest.raises(ValueError, match=r"^attention 'looking' cannot use rotate; it takes key_padding_mask, memory$"):
        block(memory, rotate=lambda q, k: (q, k))
    with pytest.raises(ValueError, match=r"^this block has no cross_attention, so it takes no memory; leave it out$"):
        block(memory, memory=memory)
    block = TransformerBlock(8, attention="looking", cross_attention="looking", causal=False)
    with pytest.raises(ValueError, match=r"^this block has a cross_attention, which needs a memory; pass memory=$"):
        block(memory)
