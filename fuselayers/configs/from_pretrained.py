"""from_pretrained -- a model with the weights of a Hugging Face checkpoint, from a folder or the hub."""

import json
import os
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from ..names import shown
from .build import Source, build
from .group_files import choices
from .hugging_face import config_of, matched

CONFIG: Final = "config.yaml"  # as `fuselayers export` writes it
_CONFIG: Final = "config.json"
_INSTALL: Final = "; install it with: pip install 'fuselayers[hub]'"
_WEIGHTS: Final = "model.safetensors"
_INDEX: Final = "model.safetensors.index.json"
# A repository may hold the same weights several times, in other formats.
_DOWNLOADED: Final = [_CONFIG, _WEIGHTS, _INDEX, "model-*-of-*.safetensors"]


def from_pretrained(
    name_or_path: str | os.PathLike[str],
    overrides: Sequence[str] = (),
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Module:
    """Return the model of a Hugging Face checkpoint, or of `fuselayers export`, with its weights, in eval mode.

    It supports GPT-2, BERT, Llama, Mistral, Mixtral, Gemma 2, Qwen2, Qwen3, OPT, GPT-NeoX, Phi, BLOOM, ViT and T5, with
    the head of their pretraining (ViT with its classifier). `transformers` is not needed. `build` makes the model, so
    `rebuild` and `fuse` work.

    Args:
        name_or_path: a folder, or the name of a repository of the hub, such as "openai-community/gpt2", which is
            downloaded into the cache of `huggingface_hub`. The folder holds config.json, or config.yaml as
            `fuselayers export` writes it, and model.safetensors (or its shards and their index).
        overrides: changes to the config that config.json or config.yaml gives, as for `build`: ["fusion=off",
            "attention.dropout=0"].
        revision: a branch, tag or commit of the repository; None for the newest.
        device: the device of the model; None for torch's default device.
        dtype: the dtype of all weights; None for the dtype that config.json names, or float32 if it names none. For an
            exported folder None keeps the dtypes of its file.

    Raises:
        ImportError: `safetensors`, or for the hub `huggingface_hub`, is not installed.
        FileNotFoundError: there is no such folder, or a file of it is missing.
        ValueError: config.json has an unknown model_type or an option that this library does not support; a weight is
            missing, has another shape or does not belong to the model; or a file is damaged.
        TypeError, ValueError: as `build`, for the overrides.
        Exception: from `huggingface_hub`, for example if the repository does not exist or there is no network.

    >>> from_pretrained("gpt2_small")
    Traceback (most recent call last):
    ValueError: 'gpt2_small' is an architecture without weights, for fuselayers.build; name a folder, or a repository as
    'openai-community/gpt2'
    """
    folder = _folder(name_or_path, revision)
    family = ""
    config: Source = folder / CONFIG
    if not (folder / CONFIG).is_file() or (folder / _CONFIG).is_file():
        content = _read_json(folder / _CONFIG)
        family, config = config_of(content)
        dtype = _dtype_of(content) if dtype is None else dtype
    device = torch.get_default_device() if device is None else device
    with torch.device("meta"):
        model = build(config, overrides)
    weights = _read_weights(folder)
    ours = matched(model, weights, family=family) if family else weights
    # Copied one by one, since the tensors are views of the file.
    state = {}
    for name in list(ours):
        tensor = ours.pop(name)
        wanted = dtype if tensor.is_floating_point() else None
        state[name] = tensor.to(device, wanted, copy=True, memory_format=torch.contiguous_format)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"the weights of {str(folder)!r} do not fit its config: {textwrap.shorten(str(error), 400)}; leave "
            "out overrides that change the architecture"
        ) from error
    return model.eval()


def _folder(name_or_path: str | os.PathLike[str], revision: str | None) -> Path:
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    name = os.fspath(name_or_path)
    if isinstance(name_or_path, Path) or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise FileNotFoundError(f"there is no folder {str(path)!r}; name a folder, or a repository as 'owner/name'")
    if name in choices("model"):
        raise ValueError(
            f"{name!r} is an architecture without weights, for fuselayers.build; name a folder, or a repository as "
            "'openai-community/gpt2'"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(f"{name!r} is not a folder here, and its download needs huggingface_hub{_INSTALL}") from error
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_DOWNLOADED))
    except Exception as error:
        error.add_note(f"there is no folder {name!r} here, so it was looked up at Hugging Face")
        raise


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{str(path.parent)!r} has no {path.name}, which every checkpoint has")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{str(path)!r} must hold a mapping, got {shown(content)}")
    return content


def _dtype_of(content: dict[str, Any]) -> torch.dtype:
    name = content.get("dtype", content.get("torch_dtype")) or "float32"
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype of config.json must be a floating dtype of torch, got {shown(name)}; pass dtype=")
    return dtype


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return every tensor of a checkpoint, as views of its files."""
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise ImportError(f"reading the weights of {str(folder)!r} needs safetensors{_INSTALL}") from error
    weights: dict[str, Tensor] = {}
    for file in _files(folder):
        if not file.is_file():
            raise FileNotFoundError(f"{str(folder)!r} lacks {file.name}, which {_INDEX} names")
        try:
            weights |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{str(file)!r} is damaged: {error}") from error
    return weights


def _files(folder: Path) -> list[Path]:
    if not (folder / _INDEX).is_file():
        if not (folder / _WEIGHTS).is_file():
            raise FileNotFoundError(
                f"{str(folder)!r} has neither {_WEIGHTS} nor {_INDEX}; pickle files such as pytorch_model.bin are not "
                "read, since they can run code: load them with transformers, and write safetensors with save_pretrained"
            )
        return [folder / _WEIGHTS]
    shards = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError(f"{_INDEX} of {str(folder)!r} must hold a weight_map from tensors to files")
    return [folder / shard for shard in sorted(set(shards.values()))]
