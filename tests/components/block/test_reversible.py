import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import Choice, Decoder, PreResidual, ReversibleBlock
from fuselayers.components.block.reversible import run_reversible
from fuselayers.ops import dropout
from fuselayers.partition import fuse, saved_bytes
from tests.components.call import Call
from tests.components.compare import assert_same_step, randomise
from tests.components.registered import registered
from tests.selection import every_value

HEADS = Choice("multi_head", {"num_heads": 2})
DROPPING = Choice("multi_head", {"num_heads": 2, "dropout": 0.1})


def blocks_of(number: int, *, p: float = 0.0, **options: object) -> nn.ModuleList:
    parts = {"attention": Choice("multi_head", {"num_heads": 2, "dropout": p}), "dropout": p}
    parts["feedforward"] = Choice("fused_mlp", {"dropout": p})
    made = nn.ModuleList(ReversibleBlock(8, **{**parts, **options}) for _ in range(number))  # type: ignore[arg-type]
    return randomise(made)  # type: ignore[return-value]


def reversible(blocks: nn.ModuleList, x: Tensor, **inputs: Tensor) -> Tensor:
    # Not leaves: the gradients must also reach the tensors they come from.
    inputs = {name: value * 2 for name, value in inputs.items()}
    return run_reversible([(block, inputs) for block in blocks], x)


def written_out(
    blocks: nn.ModuleList, x: Tensor, *, memory: Tensor | None = None, distance_bias: Tensor | None = None
) -> Tensor:
    """The formula of the paper, with autograd's own backward."""
    a = b = x
    for block in blocks:
        residual = block.residual
        biased = {} if distance_bias is None else {"distance_bias": distance_bias * 2}
        sublayers = [partial(block.attention, **biased)]
        sublayers += [] if memory is None else [partial(block.cross_attention, memory=memory * 2)]
        for number, sublayer in enumerate((*sublayers, block.feedforward)):
            norm, drop = residual.norms[number], partial(dropout, p=residual.dropout, training=blocks.training)
            if isinstance(residual, PreResidual):
                y = drop(residual.scaled(number, sublayer(norm(b))))
            else:
                y = residual.scaled(number, norm(drop(sublayer(b))))
            a, b = b, a + y
    return (a + b) / 2


def assert_is_its_formula(blocks: nn.ModuleList, x: Tensor, **inputs: Tensor) -> None:
    calls = (Call(blocks, function, {}, [*inputs]) for function in (written_out, reversible))
    assert_same_step(*calls, x, *inputs.values(), rtol=1e-9, atol=1e-9)


SKIPPING = {"layer_scale": 0.3, "stochastic_depth": 0.5}


@pytest.mark.parametrize(
    ("p", "shape", "residual"),
    [
        (0.0, (1, 1, 8), "pre"),
        (0.1, (3, 7, 8), "pre"),
        (0.0, (3, 7, 8), "post"),
        (0.1, (3, 7, 8), Choice("post", SKIPPING)),
    ],
)
def test_gradients_are_those_of_the_formula(p: float, shape: tuple[int, ...], residual: Choice | str) -> None:
    blocks = blocks_of(5, p=p, residual=residual).double()
    x = torch.randn(shape, dtype=torch.float64)
    assert_is_its_formula(blocks, x)
    assert_is_its_formula(blocks.eval(), x)


def model_of(num_layers: int, **options: object) -> Decoder:
    sizes = {"vocab_size": 13, "hidden_dim": 32, "context_length": 16, "attention": DROPPING, "block": "reversible"}
    return Decoder(num_layers=num_layers, **{**sizes, "dropout": 0.1, "init_std": 0.1, **options})  # type: ignore[arg-type]


def test_what_is_saved_does_not_grow_with_the_number_of_layers() -> None:
    tokens, targets = torch.randint(13, (2, 4, 16))
    few, many = (saved_bytes(model_of(layers), tokens, targets) for layers in (2, 8))
    assert few == many
    plain = [saved_bytes(model_of(layers, block="transformer"), tokens, targets) for layers in (2, 8)]
    assert plain[1] > 3 * plain[0]
    assert few < plain[0] / 4


class Look(nn.Module):
    """The smallest cross-attention: every token gathers the memory's mean."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x: Tensor, *, memory: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.out(x * memory.mean(1, keepdim=True))
        return y


class Weighing(nn.Module):
    """An attention that takes a bias and gives it a gradient."""

    def __init__(self, hidden_dim: int) -> None:
        super().__init__()
        self.out = nn.Linear(hidden_dim, hidden_dim)

    def forward(self, x: Tensor, *, distance_bias: Tensor) -> Tensor:
        y: Tensor = self.out(distance_bias.softmax(-1)[0] @ x)
        return y


@pytest.fixture
def parts() -> object:
    with registered("attention", look=Look, weighing=Weighing):
        yield


@pytest.mark.usefixtures("parts")
def test_gradients_reach_a_memory_and_a_bias() -> None:
    blocks = blocks_of(3, attention="weighing", cross_attention="look", causal=False).double()
    x, memory, bias = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 5, 8), (2, 3, 8), (1, 5, 5)))
    assert_is_its_formula(blocks, x, memory=memory, distance_bias=bias)


def test_backward_replays_the_masks_and_leaves_the_generator_alone() -> None:
    blocks = blocks_of(2, p=0.5)
    y = reversible(blocks, torch.randn(2, 3, 8))
    torch.manual_seed(11)
    state = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_backward_twice_and_twice_differentiated() -> None:
    blocks = blocks_of(2)
    x = torch.randn(1, 3, 8, requires_grad=True)
    loss = reversible(blocks, x).square().sum()
    once, again = (torch.autograd.grad(loss, x, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(once, again)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, x)
    text = (
        "the gradient of reversible blocks cannot be differentiated again; leave create_graph out, or use "
        "block='transformer'"
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        torch.autograd.grad(reversible(blocks, x).sum(), x, create_graph=True)


# Each backend passes its saved tensors to autograd in its own way. Inductor compiles for seconds.
@pytest.mark.parametrize(
    "backend", ["eager", *(pytest.param(backend, marks=pytest.mark.slow) for backend in ("inductor", "auto"))]
)
def test_a_fused_model_saves_as_little_and_computes_the_same(backend: str) -> None:
    tokens, targets = torch.randint(13, (2, 4, 16))
    plain = [model_of(layers) for layers in (1, 3)]
    fused = [fuse(model, backend=backend, fallback=()) for model in plain]
    few, many = (saved_bytes(model, tokens, targets) for model in fused)
    assert few == many <= saved_bytes(plain[0], tokens, targets)

    def step(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        loss = model(tokens, targets)
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    torch.testing.assert_close(step(fused[0]), step(plain[0]))


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_stack_refuses_hooks_on_its_reversible_blocks(wrapped: bool) -> None:
    model = model_of(2, dropout=0.0, attention=HEADS)
    tokens = torch.randint(13, (2, 7))
    block = model.blocks[1]
    if wrapped:
        model.blocks[1] = torch.compile(block, backend="eager")
    text = (
        "a stack runs the sublayers of a reversible block and never calls the block, so its hooks would not run; put "
        "them on the modules inside it, or use block='transformer'"
    )
    # torch keeps each kind of hook in another dictionary, and a wrapper has dictionaries besides its block's.
    for module in {block, model.blocks[1]}:
        for kind in ("forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"):
            handle = getattr(module, f"register_{kind}")(lambda *_: None)
            with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
                model(tokens)
            handle.remove()
    assert model(tokens).isfinite().all()


SHARDED = (
    "FSDP shards a reversible block, or a module in it; its hooks would lose the gradients when backward runs the "
    "block again; shard the whole model only, or use block='transformer'"
)


@pytest.mark.parametrize(
    ("part", "old"), every_value(("", ".attention", ".residual.norms.0", ".feedforward.up"), (False, True))
)
def test_a_block_that_is_sharded_in_part_is_refused(one_process_mesh: Any, part: str, old: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    model = model_of(2, dropout=0.0, attention=HEADS, feedforward=Choice("mlp"))
    place = f"blocks.1{part}"
    if old:
        wrapped = FullyShardedDataParallel(model.get_submodule(place), device_id=torch.device("cpu"))
        model.set_submodule(place, wrapped)
    else:
        fully_shard(model.get_submodule(place), mesh=one_process_mesh)
    with pytest.raises(RuntimeError, match=f"^{re.escape(SHARDED)}$"):
        model(torch.randint(13, (2, 7)))
    if part:
        with pytest.raises(RuntimeError, match=f"^{re.escape(SHARDED)}$"):
            model.blocks[1](torch.randn(2, 7, 32))
        with pytest.raises(RuntimeError, match=f"^{re.escape(SHARDED)}$"):
            fuse(model.blocks[1], backend="eager")(torch.randn(2, 7, 32))


def test_errors() -> None:
    text = (
        "a reversible block adds its sublayers to two streams, with a norm before or after each; "
        "use residual='pre' or 'post', got residual 'sandwich'"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        blocks_of(1, residual="sandwich")


def test_autocast_of_forward_holds_in_backward() -> None:
    blocks = blocks_of(2)
    x = torch.randn(2, 5, 8, requires_grad=True)
    gradients = []
    for run in (written_out, reversible):
        with torch.autocast("cpu", torch.bfloat16):
            y = run(blocks, x)
        gradients.append(torch.autograd.grad(y.float().pow(2).sum(), [x, *blocks.parameters()]))
    for got, wanted in zip(*gradients, strict=True):
        assert (got - wanted).norm() <= 1e-3 * wanted.norm()
