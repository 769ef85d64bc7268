"""Weights from Hugging Face's `transformers`: which of their names is which of ours.

A family is a list of `Key`s. Theirs and ours may hold `{}`, the number of a layer. Where several of theirs make one of
ours (queries, keys and values), they are stacked along the first dimension in the order of the list.

The names are those of `transformers` 5.20 to 5.23, whose models hold Mixtral's experts as two tensors per layer. Files
hold older names, for some families also those that `transformers` writes today; `Family.older` translates them.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor, nn

from ..names import no_such


@dataclass(frozen=True)
class Key:
    """One of their tensors and where it goes.

    Args:
        theirs: its name there.
        ours: the name here.
        transposed: whether it is a matrix [in, out], as GPT-2's are.
    """

    theirs: str
    ours: str
    transposed: bool = False


@dataclass(frozen=True)
class Family:
    """An architecture: its keys, and what there is to skip.

    Args:
        keys: in the order in which tensors that are stacked follow each other.
        repeated: theirs -> the one of theirs that it has to equal; only an untied head, which has a place of its own
            here, may differ.
        skipped: theirs that mean nothing here, as patterns.
        experts: whether layers may hold experts packed as `gate_up_proj` [E, 2 F, D] and `down_proj` [E, D, F].
        older: patterns of the names in files and what replaces them, each in turn.
    """

    keys: tuple[Key, ...]
    repeated: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    experts: bool = False
    older: tuple[tuple[str, str], ...] = ()


def load_hugging_face(model: nn.Module, state_dict: Mapping[str, Tensor], *, family: str) -> None:
    """Copy the weights of a `transformers` model into a model of the same architecture that was built here.

    `from_pretrained` builds the model too.

    Args:
        model: of `fuselayers.build`, with the sizes of theirs: "gpt2_small", "llama3_8b", ...
        state_dict: of theirs, or of a file. It is not changed, and no second copy of it is made: only what is stacked
            is, first.
        family: a name in `FAMILIES`; llama is mistral's too.

    Raises:
        ValueError: there is no such family; a weight of the model or of theirs is on the meta device; a weight of the
            model is not there, or has another shape; or one of theirs has no place in the model, or should repeat
            another one and does not. Nothing is copied then.

    >>> from fuselayers.configs import build
    >>> model = build("gpt2_tiny", ["fusion=off", "model.num_layers=1"])
    >>> load_hugging_face(model, {"transformer.wte.weight": torch.ones(256, 32)}, family="gpt2")
    Traceback (most recent call last):
    ValueError: the state_dict is no gpt2 of this model's size: blocks.0.attention.qkv.weight is not there; ...
    """
    if family not in FAMILIES:
        raise ValueError(no_such("family", family, FAMILIES))
    wanted = model.state_dict()
    _check_have_values("model", wanted, "call its to_empty")
    _check_have_values("state_dict", state_dict, "load its weights")
    model.load_state_dict(matched(wanted, state_dict, family=family))


def matched(wanted: Mapping[str, Tensor], state_dict: Mapping[str, Tensor], *, family: str) -> dict[str, Tensor]:
    """Return their tensors under our names, as views of theirs where they are not stacked. `wanted` is a state_dict of
    ours, which may be on the meta device.

    Raises:
        ValueError: as `load_hugging_face`, of what does not fit.
    """
    chosen = FAMILIES[family]
    state_dict = {_newer(chosen, name): tensor for name, tensor in state_dict.items()}
    found, misfits = _renamed(chosen, _unpacked(state_dict) if chosen.experts else state_dict, set(wanted))
    found = {name: _as_ours(tensor, wanted[name]) if name in wanted else tensor for name, tensor in found.items()}
    faults = [f"{name} is not there" for name in wanted if name not in found]
    faults += [
        f"{name} must be {list(wanted[name].shape)}, got {list(tensor.shape)}"
        for name, tensor in found.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    faults += misfits
    faults += [f"{name} has no place in it" for name in found if name not in wanted]
    if faults:
        shown = "; ".join(faults[:_SHOWN]) + ("; ..." if len(faults) > _SHOWN else "")
        raise ValueError(f"the state_dict is no {family} of this model's size: {shown}")
    return found


_SHOWN: Final = 5


def _check_have_values(whose: str, tensors: Mapping[str, Tensor], advice: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ValueError(f"{name} of the {whose} is on the meta device, where there are no values; {advice} first")


def _newer(family: Family, name: str) -> str:
    for pattern, replacement in family.older:
        name = re.sub(pattern, replacement, name)
    return name


def _renamed(family: Family, theirs: Mapping[str, Tensor], wanted: set[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Return their tensors by our names, and what is wrong with those of theirs that have none."""
    patterns = [(re.compile(re.escape(key.theirs).replace(r"\{\}", r"(\d+)")), key) for key in family.keys]
    parts: dict[str, dict[int, Tensor]] = {}
    misfits = []
    for name, tensor in theirs.items():
        if any(re.fullmatch(skipped, name) for skipped in family.skipped):
            continue
        matches = [
            (order, key, match) for order, (pattern, key) in enumerate(patterns) if (match := pattern.fullmatch(name))
        ]
        placed = [(order, key, key.ours.format(*match.groups())) for order, key, match in matches]
        repeated = family.repeated.get(name)
        if repeated is not None and not any(ours in wanted for _, _, ours in placed):
            # If the other one is missing, the error says that.
            if not torch.equal(tensor, theirs.get(repeated, tensor)):
                misfits.append(f"{name} has no place of its own in it, and does not equal {repeated}")
            continue
        if not placed:
            misfits.append(f"{name} has no place in it")
        for order, key, ours in placed:
            parts.setdefault(ours, {})[order] = tensor.T if key.transposed else tensor
    stacked = {ours: [tensors[order] for order in sorted(tensors)] for ours, tensors in parts.items()}
    # `cat` copies a single tensor too, and most are single.
    return {ours: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for ours, tensors in stacked.items()}, misfits


def _as_ours(tensor: Tensor, ours: Tensor) -> Tensor:
    """Return theirs without the leading dimensions of one that ours does not have, as a class token [1, 1, D] has."""
    extra = tensor.dim() - ours.dim()
    return tensor.flatten(0, extra) if extra > 0 and set(tensor.shape[:extra]) == {1} else tensor


def _unpacked(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors with those of experts taken apart: one gate, up and down for each."""
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


def _both(theirs: str, ours: str, *, transposed: bool = False) -> tuple[Key, Key]:
    """Weight and bias of a linear layer or a norm."""
    return Key(f"{theirs}.weight", f"{ours}.weight", transposed), Key(f"{theirs}.bias", f"{ours}.bias")


def _qkv(attention: str, *names: str) -> tuple[Key, ...]:
    """Weights and biases of queries, keys and values."""
    return tuple(key for name in names for key in _both(f"{attention}{name}", "blocks.{}.attention.qkv"))


_GPT2: Final = Family(
    keys=(
        Key("transformer.wte.weight", "token.weight"),
        Key("transformer.wpe.weight", "position.table.weight"),
        *_both("transformer.h.{}.ln_1", "blocks.{}.residual.norms.0"),
        *_both("transformer.h.{}.attn.c_attn", "blocks.{}.attention.qkv", transposed=True),
        *_both("transformer.h.{}.attn.c_proj", "blocks.{}.attention.out", transposed=True),
        *_both("transformer.h.{}.ln_2", "blocks.{}.residual.norms.1"),
        *_both("transformer.h.{}.mlp.c_fc", "blocks.{}.feedforward.up", transposed=True),
        *_both("transformer.h.{}.mlp.c_proj", "blocks.{}.feedforward.down", transposed=True),
        *_both("transformer.ln_f", "norm"),
        Key("lm_head.weight", "head.weight"),
    ),
    repeated={"lm_head.weight": "transformer.wte.weight"},
    # Causal masks, which older versions stored.
    skipped=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
    older=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),
)

_BERT: Final = Family(
    keys=(
        Key("bert.embeddings.word_embeddings.weight", "token.weight"),
        Key("bert.embeddings.position_embeddings.weight", "position.table.weight"),
        Key("bert.embeddings.token_type_embeddings.weight", "segment.weight"),
        *_both("bert.embeddings.LayerNorm", "embedding_norm"),
        *_qkv("bert.encoder.layer.{}.attention.self.", "query", "key", "value"),
        *_both("bert.encoder.layer.{}.attention.output.dense", "blocks.{}.attention.out"),
        *_both("bert.encoder.layer.{}.attention.output.LayerNorm", "blocks.{}.residual.norms.0"),
        *_both("bert.encoder.layer.{}.intermediate.dense", "blocks.{}.feedforward.up"),
        *_both("bert.encoder.layer.{}.output.dense", "blocks.{}.feedforward.down"),
        *_both("bert.encoder.layer.{}.output.LayerNorm", "blocks.{}.residual.norms.1"),
        *_both("cls.predictions.transform.dense", "head_dense"),
        *_both("cls.predictions.transform.LayerNorm", "head_norm"),
        Key("cls.predictions.bias", "bias"),
        Key("cls.predictions.decoder.weight", "head.weight"),
    ),
    repeated={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    # The heads of another task, and the numbers 0, 1, 2, ...
    skipped=(r"bert\.pooler\..*", r"cls\.seq_relationship\..*", r"bert\.embeddings\.position_ids"),
    older=((r"LayerNorm\.gamma$", "LayerNorm.weight"), (r"LayerNorm\.beta$", "LayerNorm.bias")),
)

_LLAMA_LAYER: Final = (
    Key("model.embed_tokens.weight", "token.weight"),
    *(Key(f"model.layers.{{}}.self_attn.{part}_proj.weight", "blocks.{}.attention.qkv.weight") for part in "qkv"),
    Key("model.layers.{}.self_attn.o_proj.weight", "blocks.{}.attention.out.weight"),
    Key("model.layers.{}.input_layernorm.weight", "blocks.{}.residual.norms.0.weight"),
    Key("model.norm.weight", "norm.weight"),
    Key("lm_head.weight", "head.weight"),
)
_GATED: Final = tuple(
    Key(f"model.layers.{{}}.mlp.{name}_proj.weight", f"blocks.{{}}.feedforward.{name}.weight")
    for name in ("gate", "up", "down")
)
_SECOND_NORM: Final = (Key("model.layers.{}.post_attention_layernorm.weight", "blocks.{}.residual.norms.1.weight"),)
_LLAMA_REPEATED: Final = {"lm_head.weight": "model.embed_tokens.weight"}

_LLAMA: Final = Family(
    keys=(*_LLAMA_LAYER, *_SECOND_NORM, *_GATED),
    repeated=_LLAMA_REPEATED,
    # The speeds of rotary positions, which older versions stored.
    skipped=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
)

_QWEN3: Final = Family(
    keys=(
        *_LLAMA.keys,
        Key("model.layers.{}.self_attn.q_norm.weight", "blocks.{}.attention.q_norm.weight"),
        Key("model.layers.{}.self_attn.k_norm.weight", "blocks.{}.attention.k_norm.weight"),
    ),
    repeated=_LLAMA_REPEATED,
)

_GEMMA2: Final = Family(
    keys=(
        *_LLAMA_LAYER,
        *_GATED,
        Key("model.layers.{}.post_attention_layernorm.weight", "blocks.{}.residual.norms.1.weight"),
        Key("model.layers.{}.pre_feedforward_layernorm.weight", "blocks.{}.residual.norms.2.weight"),
        Key("model.layers.{}.post_feedforward_layernorm.weight", "blocks.{}.residual.norms.3.weight"),
    ),
    repeated=_LLAMA_REPEATED,
)

_MIXTRAL: Final = Family(
    keys=(
        *_LLAMA_LAYER,
        *_SECOND_NORM,
        Key("model.layers.{}.mlp.gate.weight", "blocks.{}.feedforward.router.weight"),
        Key("model.layers.{}.mlp.experts.{}.gate_proj", "blocks.{}.feedforward.experts.{}.gate.weight"),
        Key("model.layers.{}.mlp.experts.{}.up_proj", "blocks.{}.feedforward.experts.{}.up.weight"),
        Key("model.layers.{}.mlp.experts.{}.down_proj", "blocks.{}.feedforward.experts.{}.down.weight"),
    ),
    repeated=_LLAMA_REPEATED,
    experts=True,
    older=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.weight$", r"\1.gate_proj"),
        (r"(\.experts\.\d+)\.w3\.weight$", r"\1.up_proj"),
        (r"(\.experts\.\d+)\.w2\.weight$", r"\1.down_proj"),
    ),
)

_VIT: Final = Family(
    keys=(
        Key("vit.embeddings.cls_token", "class_token"),
        Key("vit.embeddings.position_embeddings", "position.table.weight"),
        *_both("vit.embeddings.patch_embeddings.projection", "patch.projection"),
        *_qkv("vit.layers.{}.attention.", "q_proj", "k_proj", "v_proj"),
        *_both("vit.layers.{}.attention.o_proj", "blocks.{}.attention.out"),
        *_both("vit.layers.{}.layernorm_before", "blocks.{}.residual.norms.0"),
        *_both("vit.layers.{}.layernorm_after", "blocks.{}.residual.norms.1"),
        *_both("vit.layers.{}.mlp.fc1", "blocks.{}.feedforward.up"),
        *_both("vit.layers.{}.mlp.fc2", "blocks.{}.feedforward.down"),
        *_both("vit.layernorm", "norm"),
        *_both("classifier", "head"),
    ),
    # The head of another task.
    skipped=(r"vit\.pooler\..*",),
    older=(
        (r"^vit\.encoder\.layer\.", "vit.layers."),
        (r"\.attention\.attention\.query\.", ".attention.q_proj."),
        (r"\.attention\.attention\.key\.", ".attention.k_proj."),
        (r"\.attention\.attention\.value\.", ".attention.v_proj."),
        (r"\.attention\.output\.dense\.", ".attention.o_proj."),
        (r"\.intermediate\.dense\.", ".mlp.fc1."),
        (r"\.output\.dense\.", ".mlp.fc2."),
    ),
)


def _t5_stack(name: str, *, feedforward: int) -> tuple[Key, ...]:
    theirs, ours = f"{name}.block.{{}}.layer", f"{name}.blocks.{{}}"
    attentions = [("0.SelfAttention", "attention")] + [("1.EncDecAttention", "cross_attention")] * (feedforward == 2)
    return (
        *(Key(f"{theirs}.{a}.{part}.weight", f"{ours}.{b}.qkv.weight") for a, b in attentions for part in "qkv"),
        *(Key(f"{theirs}.{a}.o.weight", f"{ours}.{b}.out.weight") for a, b in attentions),
        *(Key(f"{theirs}.{n}.layer_norm.weight", f"{ours}.residual.norms.{n}.weight") for n in range(feedforward + 1)),
        Key(f"{theirs}.{feedforward}.DenseReluDense.wi.weight", f"{ours}.feedforward.up.weight"),
        # The gated form of version 1.1.
        Key(f"{theirs}.{feedforward}.DenseReluDense.wi_0.weight", f"{ours}.feedforward.gate.weight"),
        Key(f"{theirs}.{feedforward}.DenseReluDense.wi_1.weight", f"{ours}.feedforward.up.weight"),
        Key(f"{theirs}.{feedforward}.DenseReluDense.wo.weight", f"{ours}.feedforward.down.weight"),
        Key(f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight", f"{name}.position.table.weight"),
        Key(f"{name}.final_layer_norm.weight", f"{name}.norm.weight"),
    )


_T5: Final = Family(
    keys=(
        Key("shared.weight", "token.weight"),
        *_t5_stack("encoder", feedforward=1),
        *_t5_stack("decoder", feedforward=2),
        Key("lm_head.weight", "head.weight"),
    ),
    repeated=dict.fromkeys(
        ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    ),
    # No model uses it, and the first files have it.
    skipped=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)

FAMILIES: Final[dict[str, Family]] = {
    "gpt2": _GPT2,
    "bert": _BERT,
    "llama": _LLAMA,
    "qwen3": _QWEN3,
    "gemma2": _GEMMA2,
    "mixtral": _MIXTRAL,
    "vit": _VIT,
    "t5": _T5,
}
