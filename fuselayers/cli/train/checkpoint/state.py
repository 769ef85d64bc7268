"""The state of a model and its AdamW by parameter names: the same however the parameters are split or wrapped."""

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

from .groups import first_of
from .index import Checkpoint, Record
from .read import read_tensors

MODEL = "model."
_OPTIMIZER = "optimizer."


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors to save, without copies: "model.<parameter>" and "optimizer.<parameter>.<state>".

    A model may be sharded by FSDP2 or tensor parallelism, or wrapped in DDP or `torch.compile`: the names are those of
    the plain model. The options of the optimizer belong to the config.

    >>> model = nn.Linear(2, 3)
    >>> sorted(state_of(model, torch.optim.AdamW(model.parameters())))
    ['model.bias', 'model.weight']
    """
    tensors = _model_state(model)
    # Asked for the state of a new optimizer torch makes one, as after a step.
    return tensors | (_flat(get_optimizer_state_dict(model, optimizer)) if optimizer.state else {})


def load_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    *,
    path: Path,
) -> None:
    """Load a checkpoint into a model and its AdamW; all ranks of the default group call it.

    The options of the optimizer stay those of its session.

    Args:
        model: split or wrapped in any way, also in another one than the saved model.
        optimizer: of the model's parameters.
        checkpoint: of `read_checkpoint`.
        path: of the checkpoint.

    Raises:
        ValueError: the model has another architecture: the first different tensors are named, and no weight changes; or
            a tensor cannot be continued from, as one that is not finite.
    """
    model_state = _model_state(model)
    _check_model(model_state, checkpoint, path=path)
    # Of a new optimizer torch makes the state, by a step with a gradient and a learning rate of 0.
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    state = _flat(optimizer_state)
    saved = {name: tensor for name, tensor in state.items() if name in checkpoint.tensors}
    _check_optimizer(state, checkpoint, path=path)
    read_tensors(path, checkpoint, model_state | saved)
    problem = first_of(_not_a_number(model_state, saved))
    if problem is not None:
        raise ValueError(f"the checkpoint {path} cannot be continued: {problem}")
    set_model_state_dict(model, {name.removeprefix(MODEL): tensor for name, tensor in model_state.items()})
    if not saved:
        optimizer.state.clear()
        return
    # A parameter that the model never uses has no state.
    entries = cast(dict[str, Any], optimizer_state["state"])
    entries = {name: entry for name, entry in entries.items() if f"{_OPTIMIZER}{name}.step" in saved}
    set_optimizer_state_dict(
        model, optimizer, optimizer_state | {"state": entries}, options=StateDictOptions(strict=False)
    )


def not_finite(model: nn.Module) -> str | None:
    """The name of the first parameter that is not finite, or None; of a DTensor this rank's part counts."""
    return next((name for name, parameter in model.named_parameters() if not _local(parameter).isfinite().all()), None)


def _model_state(model: nn.Module) -> dict[str, Tensor]:
    return {MODEL + name: value for name, value in get_model_state_dict(model).items() if isinstance(value, Tensor)}


def _flat(optimizer_state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        f"{_OPTIMIZER}{name}.{key}": tensor
        for name, entry in optimizer_state["state"].items()
        for key, tensor in entry.items()
    }


def _check_model(wanted: Mapping[str, Tensor], checkpoint: Checkpoint, *, path: Path) -> None:
    got = {name: record for name, record in checkpoint.tensors.items() if name.startswith(MODEL)}
    differences = [f"it lacks {_short(name)}" for name in wanted if name not in got]
    differences += [f"it has {_short(name)}, which the model does not" for name in got if name not in wanted]
    differences += [
        f"{_short(name)} is {there} there and {here} in the model"
        for name, tensor in wanted.items()
        if name in got
        for there, here in ((list(got[name].shape), list(tensor.shape)), (got[name].dtype, tensor.dtype))
        if there != here
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ValueError(
            f"the checkpoint {path} is of another architecture: {'; '.join(differences[:3])}{more}; "
            "resume with the model it was trained with"
        )


def _check_optimizer(wanted: Mapping[str, Tensor], checkpoint: Checkpoint, *, path: Path) -> None:
    got = {name: record for name, record in checkpoint.tensors.items() if name.startswith(_OPTIMIZER)}
    entries = {name.rpartition(".")[0] for name in got}
    # A parameter has all of AdamW's state or none, and without any AdamW would start anew.
    complete = all(name in got for name in wanted if name.rpartition(".")[0] in entries)
    if not complete or not all(_fits(got[name], wanted.get(name)) for name in got) or (checkpoint.step > 0 and not got):
        raise ValueError(
            f"the checkpoint {path} cannot be continued: its optimizer must hold AdamW's state of the model's "
            "parameters, in their shapes"
        )


def _fits(record: Record, tensor: Tensor | None) -> bool:
    return tensor is not None and (record.dtype, list(record.shape)) == (tensor.dtype, list(tensor.shape))


def _not_a_number(model_state: Mapping[str, Tensor], optimizer_state: Mapping[str, Tensor]) -> str | None:
    for name, tensor in {**model_state, **optimizer_state}.items():
        local = _local(tensor)
        if local.is_floating_point() and not local.isfinite().all():
            return f"its {_short(name)} holds a NaN or an infinity"
        if name.endswith((".exp_avg_sq", ".step")) and name in optimizer_state and (local < 0).any():
            return f"its {name} is below 0"
    return None


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _short(name: str) -> str:
    """A parameter by its name in the model; the optimizer's tensors by their own."""
    return name.removeprefix(MODEL)
