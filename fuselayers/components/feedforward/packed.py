"""One linear layer in memory that is saved as two, so that packed and split modules load each other's weights.

weight   [2F, D]   the first half belongs to the first part
bias     [2F]
"""

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn

_PARTS: Final = ("gate", "up")


def save_in_parts(module: nn.Module) -> None:
    """Make the state_dict of a module hold the two halves of its linear layer `gate_up` as `gate` and `up`.

    Loading accepts both forms; errors use the names of the halves. The halves in a state_dict are views of the
    parameter. They can also be read as `module.gate.weight`, for tools that look up every key in the module, such as
    torch's distributed checkpoints. They cannot be assigned, so `torch.func.functional_call` needs the names of
    `named_parameters`, not those of a state_dict.

    Only the weight and bias of the layer are split. Other parameters of an adapter in its place keep their names.

    Used by `GatedMLP`.

    >>> module = nn.Module()
    >>> module.gate_up = nn.Linear(3, 4)
    >>> save_in_parts(module)
    >>> {name: list(value.shape) for name, value in module.state_dict().items()}
    {'gate.weight': [2, 3], 'gate.bias': [2], 'up.weight': [2, 3], 'up.bias': [2]}
    """
    for number, part in enumerate(_PARTS):
        setattr(module, part, _Half(module, number))
    module.register_state_dict_post_hook(_split)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_join)  # type: ignore[no-untyped-call]


class _Half:
    """One half of a packed layer, read-only."""

    def __init__(self, module: Any, number: int) -> None:
        self._module, self._number = module, number

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._module.gate_up.weight
        return weight.chunk(2)[self._number]

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self._module.gate_up.bias
        return None if bias is None else bias.chunk(2)[self._number]


def _split(module: nn.Module, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    own = {key: state_dict.pop(key) for key in list(state_dict) if key.startswith(prefix)}
    halves: dict[str, Tensor] = {}
    for name, _parameter in _parameters(module):
        both = own.pop(f"{prefix}gate_up.{name}")
        halves |= {f"{prefix}{part}.{name}": half for part, half in zip(_PARTS, both.chunk(2), strict=True)}
    # The order of the split form: first part, second part, then the layers that follow.
    for part in _PARTS:
        state_dict |= {key: half for key, half in halves.items() if key.startswith(f"{prefix}{part}.")}
    state_dict |= own


def _join(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    _metadata: Any,
    _strict: bool,
    missing_keys: list[str],
    _unexpected_keys: list[str],
    error_msgs: list[str],
) -> None:
    for name, parameter in _parameters(module):
        keys = [f"{prefix}{part}.{name}" for part in _PARTS]
        # With both halves given, the packed parameter is ignored: torch's distributed checkpoints add the module's own
        # parameters to a loaded state_dict.
        if f"{prefix}gate_up.{name}" in state_dict and not all(key in state_dict for key in keys):
            continue
        halves = {key: state_dict.pop(key) for key in keys if key in state_dict}
        missing = [key for key in keys if key not in halves]
        fitting: list[Tensor | None] = []
        for key, half in zip(keys, parameter.detach().chunk(2), strict=True):
            wrong = _misfit(key, halves[key], half) if key in halves else None
            error_msgs += [] if wrong is None else [wrong]
            fitting.append(halves[key] if key in halves and wrong is None else None)
        first, second = fitting
        both: Tensor = parameter  # a missing half keeps its values, and torch finds the packed name
        if first is not None and second is not None:
            both = _sharded_like(parameter, torch.cat((first, second)))
        elif parameter.is_meta:
            # A meta parameter has no values for a missing half, so one half cannot be loaded alone.
            missing = keys if missing else []
        elif first is not None or second is not None:
            both = parameter.detach().clone()
            for own, value in zip(both.chunk(2), fitting, strict=True):
                if value is not None:
                    own.copy_(value)
        missing_keys += missing
        state_dict[f"{prefix}gate_up.{name}"] = both


def _sharded_like(parameter: Tensor, both: Tensor) -> Tensor:
    """Shard the joined halves like the parameter if only the parameter is sharded: torch shards by name."""
    if not torch.distributed.is_available():
        return both
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(parameter, DTensor) or isinstance(both, DTensor):
        return both
    # Every process has the whole and keeps its shard, so nothing is sent.
    return distribute_tensor(both.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)


def _misfit(key: str, value: Any, half: Tensor) -> str | None:
    """Return torch's error text for a value that cannot be loaded, or None."""
    if not torch.overrides.is_tensor_like(value):  # type: ignore[no-untyped-call]
        return (
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like object from checkpoint '
            f"but received {type(value)}"
        )
    if value.shape != half.shape:
        return (
            f"size mismatch for {key}: copying a param with shape {value.shape} from checkpoint, the shape in current "
            f"model is {half.shape}."
        )
    return None


def _parameters(module: Any) -> Iterator[tuple[str, nn.Parameter]]:
    # An adapter in the layer's place, or a parametrisation, has other parameters, in the layer or deeper.
    layer = module.gate_up
    for name, parameter in layer.named_parameters(recurse=False):
        if name in ("weight", "bias") and parameter.shape[:1] == (getattr(layer, "out_features", None),):
            yield name, parameter
