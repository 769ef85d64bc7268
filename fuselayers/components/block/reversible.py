"""reversible -- blocks whose activations are recomputed from their output, so that none is saved for backward.

    x, y, a, b   [B, T, D]   B batch, T tokens, D model
    memory       [B, S, D]   the input of a decoder's cross-attention, S tokens

A run of reversible blocks has two streams. The sublayers s add to them in turn:

    a, b = x, x
    a, b = b, a + dropout(s(norm(b)))     for every sublayer of every block
    y = (a + b) / 2

With attention f and feedforward g a block is  y1 = x1 + f(norm(x2)), y2 = x2 + g(norm(y1)). Each step can be undone:
the old b is the new a, and the old a is the new b minus s(norm(old b)). So backward goes through the run from its end,
one sublayer at a time.

In the style "post" the norm applies to the branch, norm(dropout(s(b))), as in xFormers, because a norm of the sum could
not be undone.

Saved for backward: a and b at the end of the run, in float32 or wider, the inputs of all blocks, and the state of
torch's generators for each sublayer with dropout. The streams are 2 B T D numbers, independent of the number of layers.
Floor, in time: each sublayer runs forward twice.

Gomez et al., "The reversible residual network", 2017, section 3; Kitaev et al., "Reformer", 2020, section 3.
"""

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..._torch.dispatch import FakeTensor, is_dynamo_tracing
from ..._torch.guards import disable_dynamo
from ..._torch.modules import has_hooks
from ...ops import dropout
from ..plain import is_sharded
from ..registry import register, title
from ..residual import PostResidual, PreResidual
from .transformer import TransformerBlock

_SHARDED: Final = (
    "FSDP shards a reversible block, or a module in it; its hooks would lose the gradients when backward runs the "
    "block again; shard the whole model only, or use block='transformer'"
)


@register("block", "reversible")
class ReversibleBlock(TransformerBlock):
    """A transformer block on two streams, which pass through all reversible blocks of a stack.

    It has the parameters, norms, LayerScale and stochastic depth of `TransformerBlock`, but computes another function,
    and a stack of reversible blocks has a norm at its end. If gradients are needed, `fuselayers.fuse` and
    `torch.compile` break the graph around the blocks, which then run op by op and save as little as in eager mode.
    `torch.func` does not support them, as it supports no `autograd.Function` without a `setup_context`.

    A stack runs the sublayers of these blocks and never calls a block itself, so a block in a stack cannot have hooks.
    Forward hooks on the modules inside it run twice, in forward and again in backward. FSDP relies on hooks: use it on
    the whole model, not on the blocks or the modules inside them.

    The router of a mixture of experts chooses again in backward, from inputs that differ in their last bits. In rare
    cases this changes the choice, and a token's gradient comes from another expert.

    Raises:
        ValueError: as `TransformerBlock`; or a residual style other than "pre" and "post".
        RuntimeError: in a stack, if the block has a hook; if FSDP shards a module inside it; in backward, with
            create_graph=True, since its gradient cannot be differentiated again, or if a module has changed between
            train and eval mode since forward.

    >>> from fuselayers.components import Choice
    >>> block = ReversibleBlock(8, attention=Choice("multi_head", {"num_heads": 2}))
    >>> block(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    reversible: ClassVar[bool] = True

    def check_parts(self) -> None:
        """Raise ValueError unless the residual style is "pre" or "post"."""
        if type(self.residual) not in (PreResidual, PostResidual):
            raise ValueError(
                "a reversible block adds its sublayers to two streams, with a norm before or after each; "
                f"use residual='pre' or 'post', got {title(self.residual)}"
            )

    @property
    def final_norm(self) -> bool:
        """Whether a stack needs a norm after the last of these blocks. It does, because the streams are sums."""
        return True

    def forward(self, x_BTD: Tensor, **inputs: Any) -> Tensor:
        """Return the mean of the streams after this block alone: [B, T, D] -> [B, T, D].

        Args and Raises: as `TransformerBlock.forward`.
        """
        return _run_streams([(self, inputs)], x_BTD)

    def branch(self, number: int, x_BTD: Tensor, **inputs: Any) -> Tensor:
        """Return the term that a sublayer adds to one stream, computed from the other: [B, T, D] -> [B, T, D].

        Args:
            number: of the sublayer; 0 is attention, the last is the feedforward.
            x_BTD: the other stream.
            inputs: as `TransformerBlock.forward` takes them.
        """
        sublayer, norm, p = self.sublayers(**inputs)[number], self.residual.norm(number), self.residual.dropout
        if type(self.residual) is PostResidual:
            normed_BTD = norm(dropout(sublayer(x_BTD), p, training=self.training))
            return self.residual.scaled(number, normed_BTD)  # after the norm, which would undo it
        return dropout(self.residual.branch(number, sublayer, norm(x_BTD)), p, training=self.training)


def run_reversible(blocks: Sequence[tuple[Any, Mapping[str, Any]]], x_BTD: Tensor) -> Tensor:
    """Run the blocks and return the mean of the streams: [B, T, D] -> [B, T, D]; without blocks x itself.

    Used by `Stack.run_blocks` for each run of reversible blocks.

    Args:
        blocks: reversible blocks, each with its inputs, as `ReversibleBlock.branch` takes them.
        x_BTD: the stream.

    Raises:
        RuntimeError: a block has a hook, which would never run; or FSDP is applied to a block or to a module inside it.
    """
    if not blocks:
        return x_BTD
    for block, _ in blocks:
        _check_hooks(block)
    return _run_streams(blocks, x_BTD)


def _check_hooks(block: Any) -> None:
    # A wrapper, such as that of torch.compile, has its own hooks besides those of its block.
    for module in (block, block.branch.__self__):
        if is_sharded(module):
            raise RuntimeError(_SHARDED)
        if has_hooks(module):
            raise RuntimeError(
                "a stack runs the sublayers of a reversible block and never calls the block, so its hooks would not "
                "run; put them on the modules inside it, or use block='transformer'"
            )


def _run_streams(blocks: Sequence[tuple[Any, Mapping[str, Any]]], x_BTD: Tensor) -> Tensor:
    if torch.is_grad_enabled() and is_dynamo_tracing():
        return _run_outside(blocks, x_BTD)
    return _run_here(blocks, x_BTD)


def _run_here(blocks: Sequence[tuple[Any, Mapping[str, Any]]], x_BTD: Tensor) -> Tensor:
    # Undoing a sum does not restore the digits lost to rounding: few in float32, too many in bfloat16.
    a_BTD = b_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    branches = [(block, inputs, number) for block, inputs in blocks for number in range(len(block.residual.norms))]
    steps: list[_Step] = []
    learning: list[Tensor] = []
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        steps = [_Step(*branch, x_BTD) for branch in branches]
        # Every tensor that requires a gradient, once.
        learning = list({id(tensor): tensor for step in steps for tensor in step.learning}.values())
    if steps and (learning or x_BTD.requires_grad):
        # Note: [no shards inside a run] In backward FSDP's hooks replace the leaves of the run by the gathered
        # parameters, so the leaves get no gradient. Hooks around the whole model run before it.
        parts = (module for block, _ in blocks for module in block.modules() if module is not block)
        if "torch.distributed.fsdp" in sys.modules and any(map(is_sharded, parts)):
            raise RuntimeError(_SHARDED)
        a_BTD, b_BTD, *losses = _Reversible.apply(steps, a_BTD, b_BTD, *learning)  # type: ignore[no-untyped-call]
        for module, loss in zip((module for step in steps for module in step.costly), losses, strict=True):
            module.auxiliary_loss = loss
    else:
        for block, inputs, number in branches:
            a_BTD, b_BTD = b_BTD, a_BTD + block.branch(number, b_BTD.to(x_BTD.dtype), **inputs)
    return ((a_BTD + b_BTD) / 2).to(x_BTD.dtype)


# Note: [a reversible run breaks the graph] A compiler would trace the formula and lose the autograd.Function.
_run_outside = disable_dynamo("in a graph reversible blocks would save values of every layer")(_run_here)


class _Step(nn.Module):
    """One sublayer of one block; a module, so that `functional_call` can replace its parameters.

    `generators` is the state of torch's generators before forward, None if it drew no random numbers. `costly` holds
    the modules whose `auxiliary_loss` was set in forward: these losses are results of the run, besides the streams.
    Backward also needs the parameters and buffers of forward, the names of the parameters and inputs that require a
    gradient, the setting of autocast, and the modes of all modules.
    """

    def __init__(self, block: Any, inputs: Mapping[str, Any], number: int, x_BTD: Tensor) -> None:
        super().__init__()
        self.block = block
        self.inputs = inputs
        self.number = number
        self.dtype, self.device = x_BTD.dtype, x_BTD.device
        kind = self.device.type if torch.amp.is_autocast_available(self.device.type) else "cpu"  # meta has no autocast
        enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        # Note: [no cache of casts] Autocast would cache casts that were made without a graph, and later users of the
        # same weight would get no gradient.
        self.autocast = functools.partial(torch.autocast, kind, dtype=dtype, enabled=enabled, cache_enabled=False)
        self.generators: tuple[Tensor, ...] | None = None
        self.costly: tuple[Any, ...] = ()
        # `rotate` is a method of a position, or a partial of one, and the position may have parameters.
        owners = [getattr(getattr(value, "func", value), "__self__", None) for value in inputs.values()]
        self.owners = nn.ModuleList(owner for owner in owners if isinstance(owner, nn.Module))
        # The tensors used in forward. A `functional_call` around the model restores the original ones before backward.
        self.held = dict((*self.named_parameters(), *self.named_buffers()))
        self.parameters_learning = {name: value for name, value in self.held.items() if value.requires_grad}
        self.inputs_learning = {
            name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.requires_grad
        }
        self.modes = self.modes_now()

    def forward(self, b_BTD: Tensor, inputs: Mapping[str, Any]) -> Tensor:
        y_BTD: Tensor = self.block.branch(self.number, b_BTD.to(self.dtype), **inputs)
        return y_BTD

    @property
    def learning(self) -> list[Tensor]:
        """The parameters and inputs that required a gradient in forward."""
        return [*self.parameters_learning.values(), *self.inputs_learning.values()]

    def modes_now(self) -> list[bool]:
        return [module.training for module in self.modules()]

    def losses_now(self) -> dict[nn.Module, Any]:
        return {module: vars(module).get("auxiliary_loss") for module in self.modules()}

    def run(self, b_BTD: Tensor) -> Tensor:
        """Return the branch. Record whether it drew random numbers and which losses it set.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "reversible blocks set torch's generator back to repeat dropout's masks, which a CUDA graph does not "
                "repeat; use model.block=transformer, or leave out the graph"
            )
        # With fake tensors nothing is drawn, and the state of a generator has no values to compare.
        draws = not isinstance(b_BTD, FakeTensor)
        before, losses = _generators(self.device) if draws else (), self.losses_now()
        with self.autocast():
            y_BTD: Tensor = self(b_BTD, self.inputs)
        now = self.losses_now()
        self.costly = tuple(
            module for module, loss in now.items() if isinstance(loss, Tensor) and loss is not losses[module]
        )
        drew = draws and not all(map(torch.equal, before, _generators(self.device)))
        self.generators = before if drew else None
        return y_BTD

    def run_again(
        self, b_BTD: Tensor, dy_BTD: Tensor, dlosses: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the recomputed branch, the gradient of b, and the gradients of `learning`, by id."""
        # Note: [other leaves] The leaves are detached: hooks on the original tensors would run here, and again with the
        # gradients of the whole run.
        b_BTD, *leaves = (tensor.detach().requires_grad_() for tensor in (b_BTD, *self.learning))
        count = len(self.parameters_learning)
        held = self.held | dict(zip(self.parameters_learning, leaves[:count], strict=True))
        with torch.enable_grad(), _replayed(self.generators, self.device), self.autocast():
            # Note: [no leaf into a module] Hooks that track modules in backward, such as FlopCounterMode's, cannot be
            # put on a leaf of `autograd.grad`.
            of_leaves = (leaf.view_as(leaf) for leaf in leaves[count:])
            inputs = dict(self.inputs) | dict(zip(self.inputs_learning, of_leaves, strict=True))
            of_forward = [module.auxiliary_loss for module in self.costly]
            y_BTD = functional_call(self, held, (b_BTD.view_as(b_BTD), inputs))
        outputs, incoming = [y_BTD], [dy_BTD.to(y_BTD.dtype)]
        for module, loss, dloss in zip(self.costly, of_forward, dlosses, strict=True):
            outputs, incoming = [*outputs, module.auxiliary_loss], [*incoming, dloss]
            module.auxiliary_loss = loss
        through_BTD, *dlearning = torch.autograd.grad(outputs, [b_BTD, *leaves], incoming, allow_unused=True)
        # The norm of another sublayer has no gradient here; an unused tensor has none at all, as in autograd.
        gradients = {id(tensor): dx for tensor, dx in zip(self.learning, dlearning, strict=True) if dx is not None}
        return y_BTD.detach(), torch.zeros_like(b_BTD) if through_BTD is None else through_BTD, gradients


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, steps: list[_Step], a_BTD: Tensor, b_BTD: Tensor, *learning: Tensor) -> tuple[Tensor, ...]:
        for step in steps:
            a_BTD, b_BTD = b_BTD, a_BTD + step.run(b_BTD)
        ctx.steps = steps
        ctx.learning = [id(tensor) for tensor in learning]
        # Saved for torch's check that no tensor was modified before backward.
        ctx.save_for_backward(a_BTD, b_BTD, *learning)
        return a_BTD, b_BTD, *(module.auxiliary_loss for step in steps for module in step.costly)

    @staticmethod
    def backward(ctx: Any, da_BTD: Tensor, db_BTD: Tensor, *dlosses: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of reversible blocks cannot be differentiated again; leave create_graph out, or use "
                "block='transformer'"
            )
        if any(step.modes_now() != step.modes for step in ctx.steps):
            raise RuntimeError(
                "a reversible block runs again in backward, in the mode of its forward; switch train() and eval() "
                "only after backward"
            )
        a_BTD, b_BTD, *_ = ctx.saved_tensors
        gradients: dict[int, Tensor] = {}
        for step in reversed(ctx.steps):
            first = len(dlosses) - len(step.costly)
            dlosses, own = dlosses[:first], dlosses[first:]
            y_BTD, through_BTD, of_step = step.run_again(a_BTD, db_BTD, own)
            for key, gradient in of_step.items():
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
            a_BTD, b_BTD = b_BTD - y_BTD, a_BTD
            da_BTD, db_BTD = db_BTD, da_BTD + through_BTD
        return None, da_BTD, db_BTD, *map(gradients.get, ctx.learning)


def _generators(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of torch's default generators for the CPU and the device."""
    states = (torch.get_rng_state(),)
    if device.type in ("cpu", "meta"):
        return states
    return *states, torch.get_device_module(device).get_rng_state(device)


@contextlib.contextmanager
def _replayed(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Set the generators to these states, and restore them afterwards."""
    if states is None:
        yield
        return
    of_cpu, *of_device = states
    devices = [device for _ in of_device]
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        torch.set_rng_state(of_cpu)
        for state in of_device:
            torch.get_device_module(device).set_rng_state(state, device)
        yield
