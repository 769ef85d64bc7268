"""load_hugging_face -- copies the weights of a `transformers` model into a model of this library."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...names import no_such
from .families import FAMILIES
from .family import Family, Key


def load_hugging_face(model: nn.Module, state_dict: Mapping[str, Tensor], *, family: str) -> None:
    """Copy the weights of a `transformers` model into a model of the same architecture that was built here.

    `from_pretrained` also builds the model.

    Args:
        model: a model of `fuselayers.build` with the same sizes as theirs: "gpt2_small", "llama3_8b", ...
        state_dict: the state_dict of their model, or the tensors of a file. It is not changed. Only tensors that are
            stacked or reordered are copied first.
        family: a name in `FAMILIES`.

    Raises:
        ValueError: there is no such family; a tensor of the model or the state_dict is on the meta device; a weight of
            the model is missing in the state_dict or has another shape there; a tensor of the state_dict belongs to no
            weight of the model; or two of its tensors that are one weight here differ. Nothing is copied then.

    >>> from fuselayers.configs import build
    >>> model = build("gpt2_tiny", ["fusion=off", "model.num_layers=1"])
    >>> load_hugging_face(model, {"transformer.wte.weight": torch.ones(256, 32)}, family="gpt2")
    Traceback (most recent call last):
    ValueError: the state_dict does not fit this gpt2: blocks.0.attention.qkv.weight is missing; ...
    """
    if family not in FAMILIES:
        raise ValueError(no_such("family", family, FAMILIES))
    for whose, tensors, advice in (
        ("model", model.state_dict(), "call its to_empty"),
        ("state_dict", state_dict, "load its weights"),
    ):
        if name := next((name for name, tensor in tensors.items() if tensor.is_meta), None):
            raise ValueError(f"{name} of the {whose} is on the meta device, where there are no values; {advice} first")
    model.load_state_dict(matched(model, state_dict, family=family))


def matched(model: nn.Module, state_dict: Mapping[str, Tensor], *, family: str) -> dict[str, Tensor]:
    """Return their tensors under the names of a model of ours. The model may be on the meta device.

    Tensors that are neither stacked nor reordered are views of theirs.

    Raises:
        ValueError: as `load_hugging_face`, for tensors that do not fit.
    """
    chosen, wanted = FAMILIES[family].weights, model.state_dict()
    state_dict = {_newer(chosen, name): tensor for name, tensor in state_dict.items()}
    renamed, misfits = _renamed(chosen, _unpacked(state_dict), set(wanted), model)
    ours = {name: _as_ours(tensor, wanted[name]) if name in wanted else tensor for name, tensor in renamed.items()}
    faults = [f"{name} is missing" for name in wanted if name not in ours]
    faults += [
        f"{name} must be {list(wanted[name].shape)}, got {list(tensor.shape)}"
        for name, tensor in ours.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    faults += misfits
    faults += [f"{name} does not belong to the model" for name in ours if name not in wanted]
    if faults:
        more = ["..."] if len(faults) > 5 else []
        raise ValueError(f"the state_dict does not fit this {family}: {'; '.join(faults[:5] + more)}")
    return ours


def _newer(family: Family, name: str) -> str:
    for pattern, replacement in family.older:
        name = re.sub(pattern, replacement, name)
    return name


def _renamed(
    family: Family, theirs: Mapping[str, Tensor], wanted: set[str], model: nn.Module
) -> tuple[dict[str, Tensor], list[str]]:
    """Return their tensors by our names, and an error text for each tensor that does not fit."""
    patterns = [(re.compile(re.escape(key.theirs).replace(r"\{\}", r"(\d+)")), key) for key in family.keys]
    modules = dict(model.named_modules())
    parts: dict[str, dict[int, Tensor]] = {}
    misfits = []
    for name, tensor in theirs.items():
        if any(re.fullmatch(skipped, name) for skipped in family.skipped):
            continue
        placed = [
            (order, key, key.ours.format(*match.groups()))
            for order, (pattern, key) in enumerate(patterns)
            if (match := pattern.fullmatch(name))
        ]
        repeated = family.repeated.get(name)
        if repeated is not None and not any(ours in wanted for _, _, ours in placed):
            # If the repeated tensor is missing, another error reports it.
            if not torch.equal(tensor, theirs.get(repeated, tensor)):
                misfits.append(f"{name} must equal {repeated}, since both are the same weight")
            continue
        if not placed:
            misfits.append(f"{name} does not belong to the model")
        for order, key, ours in placed:
            attention = modules.get(ours.rpartition(".qkv.")[0])
            parts.setdefault(ours, {})[order] = _arranged(tensor, key, getattr(attention, "num_heads", 1))
    stacked = {ours: [tensors[order] for order in sorted(tensors)] for ours, tensors in parts.items()}
    # `cat` would copy a single tensor too, and most are single.
    return {ours: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for ours, tensors in stacked.items()}, misfits


def _arranged(tensor: Tensor, key: Key, num_heads: int) -> Tensor:
    """Return a tensor of theirs with its rows and columns in our order."""
    tensor = (tensor.T if key.transposed else tensor)[key.first_row :]
    # A tensor that cannot be divided does not have our shape; `matched` reports it.
    if key.by_head and tensor.shape[0] % (3 * num_heads) == 0:
        tensor = torch.unflatten(tensor, 0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    return tensor


def _as_ours(tensor: Tensor, ours: Tensor) -> Tensor:
    """Return their tensor without leading dimensions of size 1 that ours lacks, as in a class token [1, 1, D]."""
    extra = tensor.dim() - ours.dim()
    return tensor.flatten(0, extra) if extra > 0 and set(tensor.shape[:extra]) == {1} else tensor


def _unpacked(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with packed `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F] split by expert."""
    result: dict[str, Tensor] = {}
    for name, tensor in theirs.items():
        before, experts, last = name.rpartition(".experts.")
        if last == "gate_up_proj":
            for number, (gate, up) in enumerate(both.chunk(2) for both in tensor):
                result[f"{before}{experts}{number}.gate_proj"] = gate
                result[f"{before}{experts}{number}.up_proj"] = up
        elif last == "down_proj":
            result |= {f"{before}{experts}{number}.down_proj": down for number, down in enumerate(tensor)}
        else:
            result[name] = tensor
    return result
