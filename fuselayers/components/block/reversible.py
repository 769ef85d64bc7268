"""reversible -- blocks whose activations are computed again from their output, so that none is kept for backward.

    x, y, a, b   [B, T, D]   B batch, T tokens, D model
    memory       [B, S, D]   what a decoder's block also looks at, S tokens

A run of reversible blocks carries two streams, which the sublayers s take turns to write:

    a, b = x, x
    a, b = b, a + dropout(s(norm(b)))     for every sublayer of every block
    y = (a + b) / 2

With attention f and feedforward g a block is  y1 = x1 + f(norm(x2)), y2 = x2 + g(norm(y1)). Each step can be undone:
a is the new b less what s makes of the old b, which is the new a. So backward walks the run from its end, one sublayer
at a time.

Saved for backward: a and b at the end of the run, in float32 at least, and the inputs of all blocks; of each sublayer
that drops something the state of torch's generators. That is 2 B T D numbers, whatever the number of layers. Floor, in
time: each sublayer runs forward twice.

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

from ..._torch.dispatch import FakeTensor
from ...ops import dropout
from ..hooks import has_hooks, is_sharded
from ..registry import register, title
from ..residual import PreResidual
from .transformer import TransformerBlock

__all__ = ["ReversibleBlock", "run_reversible"]

_SHARDED: Final = (
    "FSDP shards a reversible block or a part of it by itself; blocks run again in backward, where its hooks would "
    "lose the gradients; shard the whole model only, or take block='transformer'"
)


@register("block", "reversible")
class ReversibleBlock(TransformerBlock):
    """A transformer block on two streams, which a stack of them carries from its first one to its last.

    Its parameters are those of `TransformerBlock` in the style "pre", and so are its norms, LayerScale and stochastic
    depth; the function is another one. Under `torch.compile` and `fuselayers.fuse` of a whole model the formula is
    traced as it stands, and the compiler chooses what is saved; `fuse` of single blocks leaves them as they are.
    `torch.func` refuses it, as any function of autograd that keeps what no transform could see.

    A stack runs the sublayers of such blocks and never calls a block itself, so a block in a stack can have no hooks.
    Forward hooks on the modules inside it run twice, in forward and again in backward. FSDP works by hooks: it shards
    a model of such blocks as one, not the blocks or the modules inside them.

    Raises:
        ValueError: as `TransformerBlock`; or a residual style other than "pre", or a feedforward with a loss of its
            own.
        RuntimeError: in a stack, if the block has a hook; if FSDP shards a part of it by itself; in backward, with
            create_graph=True, since its gradient cannot be differentiated again; or after a change from train to eval
            mode, or back, of any of its modules since forward.

    >>> from fuselayers.components import Choice
    >>> block = ReversibleBlock(8, attention=Choice("multi_head", {"num_heads": 2}))
    >>> block(torch.ones(1, 3, 8)).shape
    torch.Size([1, 3, 8])
    """

    reversible: ClassVar[bool] = True

    def check_parts(self) -> None:
        """Raise ValueError for a residual style or a feedforward that cannot be computed again from its output."""
        if type(self.residual) is not PreResidual:
            raise ValueError(
                "a reversible block joins its sublayers to two streams in the manner of 'pre'; "
                f"take residual='pre', got {title(self.residual)}"
            )
        if any(hasattr(module, "auxiliary_loss") for module in self.modules()):
            raise ValueError(
                f"a reversible block runs its sublayers without a graph, and the auxiliary loss of "
                f"{title(self.feedforward)} would have no gradient; take block='transformer'"
            )

    def forward(self, x_BTD: Tensor, **inputs: Any) -> Tensor:
        """Return the mean of the streams after this block alone: [B, T, D] -> [B, T, D].

        Args and Raises: as `TransformerBlock.forward`.
        """
        return _run_streams([(self, inputs)], x_BTD)

    def branch(self, number: int, x_BTD: Tensor, **inputs: Any) -> Tensor:
        """Return what the sublayer of that number adds to one stream, of the other: [B, T, D] -> [B, T, D].

        Args:
            number: 0 for attention; the feedforward is the last.
            x_BTD: the stream that it looks at.
            inputs: as `TransformerBlock.forward` takes them.
        """
        y_BTD = self.residual.branch(number, self.sublayers(**inputs)[number], self.residual.norm(number)(x_BTD))
        return dropout(y_BTD, self.residual.dropout, training=self.training)


def run_reversible(blocks: Sequence[tuple[Any, Mapping[str, Any]]], x_BTD: Tensor) -> Tensor:
    """Return the mean of the streams after some blocks: [B, T, D] -> [B, T, D]; without blocks x itself.

    Used by `Stack.run_blocks` for each row of reversible blocks.

    Args:
        blocks: reversible blocks, each with its inputs, as `ReversibleBlock.branch` takes them.
        x_BTD: the stream.

    Raises:
        RuntimeError: a block has a hook, which would never run; or FSDP shards it, or a part of it, by itself.
    """
    if not blocks:
        return x_BTD
    for block, _ in blocks:
        _check_hooks(block)
    return _run_streams(blocks, x_BTD)


def _check_hooks(block: Any) -> None:
    # A fused view has hooks of its own beside those of its module, whose sublayers are run.
    for module in (block, block.branch.__self__):
        if is_sharded(module):
            raise RuntimeError(_SHARDED)
        if has_hooks(module):
            raise RuntimeError(
                "a stack runs the sublayers of a reversible block and never calls the block, so its hooks would not "
                "run; put them on the modules inside it, or take block='transformer'"
            )


def _run_streams(blocks: Sequence[tuple[Any, Mapping[str, Any]]], x_BTD: Tensor) -> Tensor:
    # Undoing a sum gives back what was rounded away in it; in float32 that is little, in bfloat16 it is not.
    a_BTD = b_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    dtype, branches = x_BTD.dtype, [(*one, number) for one in blocks for number in range(len(one[0].residual.norms))]
    if not torch.compiler.is_compiling() and torch.is_grad_enabled():
        run = _Run(dtype, x_BTD.device, [_Step(*branch) for branch in branches])
        learning = run.learning
        if learning or x_BTD.requires_grad:
            # Note: [no shards inside a run] In backward the hooks of FSDP put the parameters that they gathered where
            # the run has put its leaves, which then get no gradient. Around the whole model they run before it.
            parts = (module for block, _ in blocks for module in block.modules() if module is not block)
            if "torch.distributed.fsdp" in sys.modules and any(map(is_sharded, parts)):
                raise RuntimeError(_SHARDED)
            a_BTD, b_BTD = _Reversible.apply(run, a_BTD, b_BTD, *learning)  # type: ignore[no-untyped-call]
            return _mean(a_BTD, b_BTD, dtype)
    for block, inputs, number in branches:
        a_BTD, b_BTD = b_BTD, a_BTD + block.branch(number, b_BTD.to(dtype), **inputs)
    return _mean(a_BTD, b_BTD, dtype)


def _mean(a_BTD: Tensor, b_BTD: Tensor, dtype: torch.dtype) -> Tensor:
    return ((a_BTD + b_BTD) / 2).to(dtype)


class _Step(nn.Module):
    """One sublayer of one block; a module, so that `functional_call` can put other tensors in its parameters' place.

    `generators` is what torch's generators were before it drew from them, None if it drew nothing. What forward found
    is kept for backward: the parameters and buffers that it held, which of them and of the inputs want a gradient, by
    name, and the modes of all modules.
    """

    def __init__(self, block: Any, inputs: Mapping[str, Any], number: int) -> None:
        super().__init__()
        self.block = block
        self.inputs = inputs
        self.number = number
        self.generators: tuple[Tensor, ...] | None = None
        # `rotate` is a method of a position, or a partial of one, and the position may learn.
        owners = [getattr(getattr(value, "func", value), "__self__", None) for value in inputs.values()]
        self.owners = nn.ModuleList(owner for owner in owners if isinstance(owner, nn.Module))
        # Those of forward: in backward `functional_call` around a model has put the model's own ones back.
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


@dataclass
class _Run:
    """A row of sublayers. `autocast` is how forward ran, for backward to run alike."""

    dtype: torch.dtype
    device: torch.device
    steps: list[_Step]
    autocast: Mapping[str, Any] | None = None

    @property
    def learning(self) -> list[Tensor]:
        """Everything that wanted a gradient in forward, once each."""
        of_steps = ((*step.parameters_learning.values(), *step.inputs_learning.values()) for step in self.steps)
        return list({id(tensor): tensor for tensors in of_steps for tensor in tensors}.values())

    def remember_autocast(self) -> None:
        kind = self.device.type
        if torch.amp.is_autocast_available(kind):
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            # Note: [no cache of casts] What autocast casts without a graph, it would hand from its cache to later users
            # of the same weight, and they would get no gradient.
            self.autocast = {"device_type": kind, "enabled": enabled, "dtype": dtype, "cache_enabled": False}

    def forward(self, step: _Step, b_BTD: Tensor) -> Tensor:
        """Return the step's branch, and note what it draws."""
        # Fake tensors draw nothing, and among them a generator's state has no values to compare.
        draws = not isinstance(b_BTD, FakeTensor)
        before = _generators(self.device) if draws else ()
        with self._alike():
            y_BTD: Tensor = step(b_BTD.to(self.dtype), step.inputs)
        drew = draws and not all(map(torch.equal, before, _generators(self.device)))
        step.generators = before if drew else None
        return y_BTD

    def backward(self, step: _Step, b_BTD: Tensor, dy_BTD: Tensor) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return the step's branch again, its gradient to b, and those to what it learns, by id."""
        own, given = step.parameters_learning, step.inputs_learning
        wanted = [*own.values(), *given.values()]
        # Note: [other leaves] With the tensors themselves the hooks on them would run here, and again when autograd
        # gets the gradients of the whole run.
        b_BTD, *leaves = (tensor.detach().requires_grad_() for tensor in (b_BTD, *wanted))
        held = step.held | dict(zip(own, leaves[: len(own)], strict=True))
        with torch.enable_grad(), _replayed(step.generators, self.device), self._alike():
            # Note: [no leaf into a module] Hooks that follow modules through backward, as those of torch's
            # FlopCounterMode, cannot be put on a leaf of `autograd.grad`.
            of_leaves = (leaf.view_as(leaf) for leaf in leaves[len(own) :])
            inputs = dict(step.inputs) | dict(zip(given, of_leaves, strict=True))
            y_BTD = functional_call(step, held, (b_BTD.view_as(b_BTD).to(self.dtype), inputs))
        through_BTD, *found = torch.autograd.grad(y_BTD, [b_BTD, *leaves], dy_BTD.to(y_BTD.dtype), allow_unused=True)
        # The norm of another sublayer gets none here, and what nothing reads none at all, as with autograd's own.
        gradients = {id(one): dx for one, dx in zip(wanted, found, strict=True) if dx is not None}
        return y_BTD.detach(), torch.zeros_like(b_BTD) if through_BTD is None else through_BTD, gradients

    def _alike(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast(**self.autocast) if self.autocast else contextlib.nullcontext()


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, a_BTD: Tensor, b_BTD: Tensor, *learning: Tensor) -> tuple[Tensor, Tensor]:
        run.remember_autocast()
        for step in run.steps:
            a_BTD, b_BTD = b_BTD, a_BTD + run.forward(step, b_BTD)
        ctx.run = run
        # What learns is saved for torch's check that nobody changed it in the meantime.
        ctx.save_for_backward(a_BTD, b_BTD, *learning)
        return a_BTD, b_BTD

    @staticmethod
    def backward(ctx: Any, da_BTD: Tensor, db_BTD: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of reversible blocks cannot be differentiated again; leave create_graph out, or take "
                "block='transformer'"
            )
        run: _Run = ctx.run
        if any(step.modes_now() != step.modes for step in run.steps):
            raise RuntimeError(
                "reversible blocks run again in backward, as they ran in forward; change between train() and eval() "
                "after backward"
            )
        a_BTD, b_BTD, *_ = ctx.saved_tensors
        gradients: dict[int, Tensor] = {}
        for step in reversed(run.steps):
            y_BTD, through_BTD, found = run.backward(step, a_BTD, db_BTD)
            for key, gradient in found.items():
                gradients[key] = gradients[key] + gradient if key in gradients else gradient
            a_BTD, b_BTD = b_BTD - y_BTD, a_BTD
            da_BTD, db_BTD = db_BTD, da_BTD + through_BTD
        return None, da_BTD, db_BTD, *(gradients.get(id(tensor)) for tensor in run.learning)


def _generators(device: torch.device) -> tuple[Tensor, ...]:
    """Return the states of torch's default generators, of the CPU and of the device."""
    states = (torch.get_rng_state(),)
    if device.type in ("cpu", "meta"):
        return states
    return *states, torch.get_device_module(device).get_rng_state(device)


def _set_generators(states: tuple[Tensor, ...], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.get_device_module(device).set_rng_state(state, device)


@contextlib.contextmanager
def _replayed(states: tuple[Tensor, ...] | None, device: torch.device) -> Iterator[None]:
    """Let the generators draw again what they drew from these states, and be as they were afterwards."""
    if states is None:
        yield
        return
    now = _generators(device)
    _set_generators(states, device)
    try:
        yield
    finally:
        _set_generators(now, device)
