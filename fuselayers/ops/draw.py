"""draw -- the seeds of masks, the library's only source of randomness."""

from typing import Any, Final

import torch
from torch import Tensor

from .._torch.dispatch import is_intercepted
from .._torch.inductor import draw_in_inductor
from .philox import check_probability, check_seed

__all__ = ["draw_seed", "seed_or_draw"]

_LOWEST_SEED: Final = -(1 << 63)
_HIGHEST_SEED: Final = (1 << 63) - 1


def draw_seed(*, device: torch.device | str = "cpu") -> Tensor:
    """Draw a seed from torch's default generator of `device`: an int64 tensor of shape [] on that device.

    This is the library's only source of randomness. Fused ops take a seed and draw nothing, so that
    `torch.manual_seed`, `torch.utils.checkpoint` and `torch.compile` replay exactly this one call. Under a compiler, a
    dispatch mode or a transform it is a registered op; else it is `torch.randint`, which takes a tenth of the time.
    Inside `torch.vmap` it obeys `randomness`: "error" raises, "same" draws one seed for all samples, "different" one
    for each.

    Raises:
        RuntimeError: inside a `torch.vmap` whose `randomness` is "error", which is its default.

    >>> _ = torch.manual_seed(0)
    >>> first = draw_seed()
    >>> _ = torch.manual_seed(0)
    >>> bool(first == draw_seed())
    True
    """
    device = torch.device(device)
    if not is_intercepted():
        return _drawn(device)
    # Note: [a fresh tensor for every draw] torch's partitioner merges equal calls, except those of its own random ops.
    # Two draws with equal arguments would become one, and two dropouts would share a mask. vmap too checks `randomness`
    # for torch's random ops only. `randperm` is such an op: with 0 it takes no number from the generator, is never
    # merged, raises where vmap forbids randomness, and is batched where samples must differ.
    fresh = torch.randperm(0, device=device)
    seed: Tensor = torch.ops.fuselayers.draw_seed(fresh, device=device)
    return seed


def seed_or_draw(x: Tensor, p: float, *, training: bool, seed: Tensor | None) -> Tensor | None:
    """Return the given seed, or draw one; None if the call drops nothing. Used by ops with dropout.

    Raises:
        ValueError, TypeError: as `check_probability` and `check_seed`.
        RuntimeError: as `draw_seed`.
    """
    check_probability(p)
    if seed is not None:
        check_seed(seed, x.device)
    if not (training and p):
        return None
    return draw_seed(device=x.device) if seed is None else seed


# The tag tells partitioners and checkpoint policies that the draw must not run twice. The device is keyword-only,
# because selective checkpointing reads it from the keywords when it replays the call.
_library = torch.library.Library("fuselayers", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("draw_seed(Tensor fresh, *, Device device) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]


def _drawn(device: torch.device) -> Tensor:
    return torch.randint(_LOWEST_SEED, _HIGHEST_SEED, (), dtype=torch.int64, device=device)


def _empty_seed(fresh: Tensor, *, device: torch.device) -> Tensor:
    # The n-th dropout of a model gets the n-th seed, in whatever order a compiler runs them. No other hook of torch
    # runs before every lowering.
    draw_in_inductor(torch.ops.fuselayers.draw_seed.default, lowest=_LOWEST_SEED, highest=_HIGHEST_SEED)
    return torch.empty((), dtype=torch.int64, device=device)


def _draw_for_every_sample(
    info: Any, in_dims: tuple[int | None, ...], fresh: Tensor, *, device: torch.device
) -> tuple[Tensor, int]:
    # `fresh` is batched only where vmap's randomness is "different".
    draw = torch.ops.fuselayers.draw_seed
    return torch.stack([draw(sample, device=device) for sample in fresh.unbind(in_dims[0] or 0)]), 0


_library.impl("draw_seed", lambda fresh, *, device: _drawn(device), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("fuselayers::draw_seed", _empty_seed, lib=_library)
torch.library.register_vmap("fuselayers::draw_seed", _draw_for_every_sample, lib=_library)
