"""A training batch of a model. Used by `tune`, `explain` and `bench model`."""

from typing import Any

import torch
from torch import Tensor

from ..configs import Config
from ..configs.costs import check_described


def example_batch(
    model: Any, config: Config, sizes: tuple[int, ...], *, device: torch.device | str, option: str = "--batch"
) -> tuple[Tensor, ...]:
    """Return a random training batch for the model of a config.

    Args:
        sizes: examples; for a model with a context length also the tokens of each (default all).

    Raises:
        ValueError: the model has no `example_inputs`, or the sizes do not fit it.
    """
    check_described(config, model)
    context = config.model.options.get("context_length")
    if context is None and len(sizes) > 1:
        raise ValueError(
            f"model {config.model.name!r} has no context length; {option} must be a number of examples, as 4, "
            f"got {'x'.join(map(str, sizes))}"
        )
    inputs = model.example_inputs(sizes[0], device=device)
    if len(sizes) > 1:
        inputs = [tensor[:, : sizes[1]].contiguous() for tensor in inputs]
    highest = config.model.options.get("vocab_size") or config.model.options.get("num_classes") or 1
    return tuple(tensor.normal_() if tensor.is_floating_point() else tensor.random_(highest) for tensor in inputs)
