"""What a model is called with in training. Used by `tune`, `explain` and `bench model`."""

from typing import Any

import torch
from torch import Tensor

from ..configs import Config

__all__ = ["example_batch"]


def example_batch(
    model: Any, config: Config, sizes: tuple[int, ...], *, device: torch.device | str, option: str = "--batch"
) -> tuple[Tensor, ...]:
    """Return what the model of a config is called with in training, all of it 0, in a batch of other sizes.

    Args:
        model: the model, without fusion around it.
        config: of the model.
        sizes: examples, and of a model with a context length the tokens of each; without those, all of it.
        device: where the batch is.
        option: what an error names.

    Raises:
        ValueError: the model does not say what it is called with, or cannot be called with these sizes.
    """
    if not hasattr(model, "example_inputs"):
        raise ValueError(
            f"model {config.model.name!r} does not say what it is called with; give {type(model).__name__} a method "
            'example_inputs(batch_size=1, device="meta")'
        )
    context = config.model.options.get("context_length")
    if context is None and len(sizes) > 1:
        raise ValueError(
            f"model {config.model.name!r} has no context length; {option} must be a number of examples, as 4, "
            f"got {'x'.join(map(str, sizes))}"
        )
    inputs = tuple(model.example_inputs(sizes[0], device=device))
    return inputs if len(sizes) == 1 else tuple(tensor[:, : sizes[1]].contiguous() for tensor in inputs)
