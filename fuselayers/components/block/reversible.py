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
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..._torch.dispatch import FakeTensor, is_dynamo_tracing
from ..._torch.guards import disable_dynamo
from ...ops import dropout
from ..hooks import has_hooks, is_sharded
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
    dtype = x_BTD.dtype
    branches = [(block, inputs, number) for block, inputs in blocks for number in range(len(block.residual.norms))]
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        run = _Run(dtype, x_BTD.device, [_Step(*branch) for branch in branches])
        learning = run.learning
        if learning or x_BTD.requires_grad:
            # Note: [no shards inside a run] In backward FSDP's hooks replace the leaves of the run by the gathered
            # parameters, so the leaves get no gradient. Hooks around the whole model run before it.
            parts = (module for block, _ in blocks for module in block.modules() if module is not block)
            if "torch.distributed.fsdp" in sys.modules and any(map(is_sharded, parts)):
                raise RuntimeError(_SHARDED)
            a_BTD, b_BTD, *losses = _Reversible.apply(run, a_BTD, b_BTD, *learning)  # type: ignore[no-untyped-call]
            for module, loss in zip((module for step in run.steps for module in step.costly), losses, strict=True):
                module.auxiliary_loss = loss
            return _mean(a_BTD, b_BTD, dtype)
    for block, inputs, number in branches:
        a_BTD, b_BTD = b_BTD, a_BTD + block.branch(number, b_BTD.to(dtype), **inputs)
    return _mean(a_BTD, b_BTD, dtype)


# Note: [a reversible run breaks the graph] A compiler would trace the formula and lose the autograd.Function.
_run_outside = disable_dynamo("in a graph reversible blocks would save values of every layer")(_run_here)


def _mean(a_BTD: Tensor, b_BTD: Tensor, dtype: torch.dtype) -> Tensor:
    return ((a_BTD + b_BTD) / 2).to(dtype)


class _Step(nn.Module):
    """One sublayer of one block; a module, so that `functional_call` can replace its parameters.

    `generators` is the state of torch's generators before forward, None if it drew no random numbers. `costly` holds
    the modules whose `auxiliary_loss` was set in forward: these losses are results of the run, besides the streams.
    Backward also needs the parameters and buffers of forward, the names of the parameters and inputs that require a
    gradient, and the modes of all modules.
    """

    def __init__(self, block: Any, inputs: Mapping[str, Any], number: int) -> None:
        super().__init__()
        self.block = block
        self.inputs = inputs
        self.number = number
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
        y_BTD: Tensor = self.block.branch(self.number, b_BTD, **inputs)
        return y_BTD

    def modes_now(self) -> list[bool]:
        return [module.training for module in self.modules()]

    def losses_now(self) -> dict[nn.Module, Any]:
        return {module: vars(module).get("auxiliary_loss") for module in self.modules()}


@dataclass
class _Run:
    """A run of sublayers. `autocast` is the autocast setting in forward, which backward uses too."""

    dtype: torch.dtype
    device: torch.device
    steps: list[_Step]
    autocast: Mapping[str, Any] | None = None

    @property
    def learning(self) -> list[Tensor]:
        """Every tensor that required a gradient in forward, once."""
        of_steps = ((*step.parameters_learning.values(), *step.inputs_learning.values()) for step in self.steps)
        return list({id(tensor): tensor for tensors in of_steps for tensor in tensors}.values())

    def remember_autocast(self) -> None:
        kind = self.device.type
        if torch.amp.is_autocast_available(kind):
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            # Note: [no cache of casts] Autocast would cache casts that were made without a graph, and later users of
            # the same weight would get no gradient.
            self.autocast = {"device_type": kind, "enabled": enabled, "dtype": dtype, "cache_enabled": False}

    def forward(self, step: _Step, b_BTD: Tensor) -> Tensor:
        """Return the step's branch. Record whether it drew random numbers and which losses it set.

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
        before, losses = _generators(self.device) if draws else (), step.losses_now()
        with self._autocast():
            y_BTD: Tensor = step(b_BTD.to(self.dtype), step.inputs)
        now = step.losses_now()
        step.costly = tuple(
            module for module, loss in now.items() if isinstance(loss, Tensor) and loss is not losses[module]
        )
        drew = draws and not all(map(torch.equal, before, _generators(self.device)))
        step.generators = before if drew else None
        return y_BTD

    def backward(
        self, step: _Step, b_BTD: Tensor, dy_BTD: Tensor, dlosses: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the recomputed branch, the gradient of b, and the gradients of the step's other tensors, by id."""
        parameters, inputs_learning = step.parameters_learning, step.inputs_learning
        wanted = [*parameters.values(), *inputs_learning.values()]
        # Note: [other leaves] The leaves are detached: hooks on the original tensors would run here, and again with the
        # gradients of the whole run.
        b_BTD, *leaves = (tensor.detach().requires_grad_() for tensor in (b_BTD, *wanted))
        held = step.held | dict(zip(parameters, leaves[: len(parameters)], strict=True))
        with torch.enable_grad(), _replayed(step.generators, self.device), self._autocast():
            # Note: [no leaf into a module] Hooks that track modules in backward, such as FlopCounterMode's, cannot be
            # put on a leaf of `autograd.grad`.
            of_leaves = (leaf.view_as(leaf) for leaf in leaves[len(parameters) :])
            inputs = dict(step.inputs) | dict(zip(inputs_learning, of_leaves, strict=True))
            of_forward = [module.auxiliary_loss for module in step.costly]
            y_BTD = functional_call(step, held, (b_BTD.view_as(b_BTD).to(self.dtype), inputs))
        outputs, incoming = [y_BTD], [dy_BTD.to(y_BTD.dtype)]
        for module, loss, dloss in zip(step.costly, of_forward, dlosses, strict=True):
            outputs, incoming = [*outputs, module.auxiliary_loss], [*incoming, dloss]
            module.auxiliary_loss = loss
        through_BTD, *dwanted = torch.autograd.grad(outputs, [b_BTD, *leaves], incoming, allow_unused=True)
        # The norm of another sublayer has no gradient here; an unused tensor has none at all, as in autograd.
        gradients = {id(tensor): dx for tensor, dx in zip(wanted, dwanted, strict=True) if dx is not None}
        return y_BTD.detach(), torch.zeros_like(b_BTD) if through_BTD is None else through_BTD, gradients

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(**self.autocast) if self.autocast else contextlib.nullcontext()


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, a_BTD: Tensor, b_BTD: Tensor, *learning: Tensor) -> tuple[Tensor, ...]:
        run.remember_autocast()
        for step in run.steps:
            a_BTD, b_BTD = b_BTD, a_BTD + run.forward(step, b_BTD)
        ctx.run = run
        # Saved for torch's check that no tensor was modified before backward.
        ctx.save_for_backward(a_BTD, b_BTD, *learning)
        return a_BTD, b_BTD, *(module.auxiliary_loss for step in run.steps for module in step.costly)

    @staticmethod
    def backward(ctx: Any, da_BTD: Tensor, db_BTD: Tensor, *dlosses: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of reversible blocks cannot be differentiated again; leave create_graph out, or use "
                "block='transformer'"
            )
        run: _Run = ctx.run
        if any(step.modes_now() != step.modes for step in run.steps):
            raise RuntimeError(
                "a reversible block runs again in backward, in the mode of its forward; switch train() and eval() "
                "only after backward"
            )
        a_BTD, b_BTD, *_ = ctx.saved_tensors
        gradients: dict[int, Tensor] = {}
        for step in reversed(run.steps):
            dlosses, own = dlosses[: len(dlosses) - len(step.costly)], dlosses[len(dlosses) - len(step.costly) :]
            y_BTD, through_BTD, of_step = run.backward(step, a_BTD, db_BTD, own)
            for key, gradient in of_step.items():
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
            a_BTD, b_BTD = b_BTD - y_BTD, a_BTD
            da_BTD, db_BTD = db_BTD, da_BTD + through_BTD
        return None, da_BTD, db_BTD, *(gradients.get(id(tensor)) for tensor in run.learning)


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
