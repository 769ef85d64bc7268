"""The state of a model and its AdamW by parameter names, which do not depend on splitting or wrapping."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from .checkpoint import read_tensors, saved_tensors

MODEL = "model."
_OPTIMIZER = "optimizer."


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors to save, without copies: "model.<parameter>" and "optimizer.<parameter>.<state>".

    A model may be sharded by FSDP2 or tensor parallelism, or wrapped in DDP or `torch.compile`: the names are those of
    the plain model. The options of the optimizer belong to the config.
    """
    # For a new optimizer torch would create state, as after a step.
    return _model_state(model) | (_flat(get_optimizer_state_dict(model, optimizer)) if optimizer.state else {})


def load_state(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Load a checkpoint into a model and its AdamW; all processes call it.

    The options of the optimizer are not loaded.

    Args:
        model: split or wrapped in any way, even differently from the saved model.
        path: of the checkpoint; `read_checkpoint` must have compared its checksums.

    Raises:
        ValueError: the model has another architecture.
    """
    model_state = _model_state(model)
    # For a new optimizer torch makes the state, by a step with a gradient and a learning rate of 0.
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    there = saved_tensors(path)
    # A parameter that the model never uses has no state.
    saved = {name: tensor for name, tensor in _flat(optimizer_state).items() if name in there}
    try:
        read_tensors(path, model_state | saved)
    except (RuntimeError, ValueError) as error:
        raise ValueError(
            f"the checkpoint {path} has another architecture: {error}; resume with the model it was trained with"
        ) from error
    set_model_state_dict(model, {name.removeprefix(MODEL): tensor for name, tensor in model_state.items()})
    entries = cast(dict[str, Any], optimizer_state["state"])
    entries = {name: entry for name, entry in entries.items() if f"{_OPTIMIZER}{name}.step" in saved}
    set_optimizer_state_dict(
        model, optimizer, optimizer_state | {"state": entries}, options=StateDictOptions(strict=False)
    )


def not_finite(model: nn.Module) -> str | None:
    """Return the name of the first parameter that is not finite, or None; of a DTensor only this rank's part counts."""
    for name, parameter in model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not local.isfinite().all():
            return name
    return None


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    return {MODEL + name: value for name, value in get_model_state_dict(model).items() if isinstance(value, Tensor)}


def _flat(optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"{_OPTIMIZER}{name}.{key}": tensor
        for name, entry in optimizer_state["state"].items()
        for key, tensor in entry.items()
    }
