"""A training batch of a model. Used by `tune`, `explain`, `swap` and `bench model`."""

from typing import Any

import torch
from torch import Tensor

from ..configs import Config
from ..configs.costs import check_described
from ..names import shown


def sizes_of(text: str, *, option: str) -> tuple[int, ...]:
    """Return the sizes in the text of an option, such as 4x128.

    Raises:
        ValueError: the text is not of this form.
    """
    sizes = text.split("x")
    if not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ValueError(f"{option} must be sizes above 0 with x between them, such as 4x128, got {shown(text)}")
    return tuple(map(int, sizes))


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
    most = sizes[:1] if context is None else (sizes[0], context)
    if len(sizes) > len(most) or sizes[1:] > most[1:]:
        wanted = "a number of examples" if context is None else f"sequences x tokens, with at most {context} tokens"
        raise ValueError(f"{option} must be {wanted}, got {'x'.join(map(str, sizes))}")
    inputs = model.example_inputs(sizes[0], device=device)
    if len(sizes) > 1:
        inputs = [tensor[:, : sizes[1]].contiguous() for tensor in inputs]
    highest = config.model.options.get("vocab_size") or config.model.options.get("num_classes") or 1
    return tuple(tensor.normal_() if tensor.is_floating_point() else tensor.random_(highest) for tensor in inputs)
