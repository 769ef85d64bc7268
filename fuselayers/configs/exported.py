"""A trained model as a folder: its config.yaml and model.safetensors, as `fuselayers export` writes them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from .build import build
from .memory import check_bytes

CONFIG: Final = "config.yaml"


def is_exported(folder: Path) -> bool:
    """Whether `fuselayers export` wrote a folder, and not `save_pretrained` of transformers."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def exported_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    overrides: Sequence[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """The model of an exported folder, in eval mode. Used by `from_pretrained`, whose arguments these are.

    Args:
        folder: with config.yaml.
        weights: of its model.safetensors.
        overrides: of its config.
        device: None for torch's default device.
        dtype: of all weights with a floating dtype; None for those of the file.

    Raises:
        ValueError: a weight is missing, has another shape or no place in the model; or they do not fit into memory.
        TypeError, ValueError: as `build`.
    """
    device = torch.device(torch.get_default_device() if device is None else device)
    with torch.device("meta"):
        model = build(folder / CONFIG, overrides)
    wanted = model.state_dict()
    differences = [f"it lacks {name}" for name in wanted if name not in weights]
    differences += [f"it has {name}, which the model does not" for name in weights if name not in wanted]
    differences += [
        f"{name} is {list(weights[name].shape)} there and {list(tensor.shape)} in the model"
        for name, tensor in wanted.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    if differences:
        more = f" (and {len(differences) - 3} more)" if len(differences) > 3 else ""
        raise ValueError(
            f"the weights of {str(folder)!r} are not those of its config: {'; '.join(differences[:3])}{more}; leave "
            "out overrides that change the architecture"
        )
    dtypes = {
        name: tensor.dtype if dtype is None or not tensor.is_floating_point() else dtype
        for name, tensor in weights.items()
    }
    check_bytes(sum(weights[name].numel() * one.itemsize for name, one in dtypes.items()), device, what="the model")
    # Copies: the tensors of a file are views of it.
    state = {name: weights[name].to(device, dtypes[name], copy=True) for name in wanted}
    model.load_state_dict(state, assign=True)
    return model.eval()
