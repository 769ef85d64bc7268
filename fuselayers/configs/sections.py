"""The sections of a config: their options, how a change applies, and the finished `Config`.

The section of a component is a plain dict {"name": a registered name, option: value, ...} with every option that has a
value. An option may hold a component too, such as a model's block or the expert of a mixture; its value is such a dict.
The other sections are dataclasses, described by their annotations.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final, Literal, TypeVar

from omegaconf import Container, DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError

from ..components import REQUIRED, Choice, LayerChange, names
from ..components.fused_op import check_names
from ..components.model.layers import PARTS
from ..components.option import (
    Count,
    Decay,
    NotNegative,
    Positive,
    Range,
    Size,
    checked,
    construct,
    described,
    judged,
    no_option,
    options_of,
)
from ..names import no_such, shown
from ..other_names import ours_for
from ..partition import partitioner
from .values import REFERENCE, plain_copy

# The options of models whose values are lists of {at: layers, component: its name or options}.
_LAYER_OPTIONS: Final = ("layers", "decoder_layers")
_ABSENT: Final = object()
Section = TypeVar("Section", bound=type)


def _section(name: str) -> Callable[[Section], Section]:
    """Decorate the dataclass of a section to judge its fields, under their paths in a config."""

    def decorate(section: Section) -> Section:
        section.__init__ = checked(section.__init__, where=name)  # type: ignore[misc]
        return section

    return decorate


@_section("fusion")
@dataclass(frozen=True)
class FusionConfig:
    """How much of a model is fused, and how.

    Raises:
        ValueError: an unknown backend, partitioner, compression or scope.
    """

    backend: Annotated[str, "the compiler of the two graphs, as `fuse` takes it"] = "auto"
    partition: Annotated[
        str,
        "how `fuse` chooses what to save for backward: min_cut, default, budget:0.5 (a share), budget:2GB (bytes), "
        "budget:peak:2GB (the most that forward and backward hold at once)",
    ] = "min_cut"
    compress: Annotated[str | None, "large saved values in fewer bits: int8, float8 or bfloat16; null is exact"] = None
    scope: Annotated[
        Literal["none", "block", "model"], "what is fused as one function: none, each block, or the whole model"
    ] = "block"
    cuda_graphs: Annotated[
        bool | None,
        "on a GPU, run forward and backward as CUDA graphs, with scope=model; null: only `train`, where it can",
    ] = None

    def __post_init__(self) -> None:
        if self.cuda_graphs and self.scope != "model":
            raise ValueError(
                f"fusion.cuda_graphs needs fusion.scope=model, got {self.scope}; a graph of each block would copy its "
                "results"
            )
        check_names(self.backend, self.partition, compress=self.compress)


@_section("train")
@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Raises:
        ValueError, TypeError: a value is out of range, or has another type.
    """

    steps: Annotated[Size, "updates of the weights (steps)"]
    batch_size: Annotated[Size, "sequences in a micro-batch (sequences)"]
    accumulate: Annotated[Size, "micro-batches whose gradients make one step (micro-batches)"]
    learning_rate: Annotated[Positive, "the highest rate, after the warm-up (per step)"]
    min_learning_rate: Annotated[NotNegative, "the rate of the last step, at the end of the cosine (per step)"]
    warmup_steps: Annotated[Count, "how long the learning rate rises from zero (steps)"]
    weight_decay: Annotated[NotNegative, "weight decay of AdamW, on matrices only (per unit of learning rate)"]
    beta1: Annotated[Decay, "decay of AdamW's mean gradient (per step)"]
    beta2: Annotated[Decay, "decay of AdamW's mean squared gradient (per step)"]
    clip_norm: Annotated[NotNegative, "the largest norm of the gradient; 0 does not clip"]
    precision: Annotated[Literal["float32", "bfloat16"], "bfloat16 runs matmuls under autocast; weights stay float32"]
    seed: Annotated[int, Range(minimum=0, below=2**63), "seed of weights, batches and dropout"]
    evaluate_every: Annotated[Size, "how often the validation loss is measured (steps)"]
    evaluate_batches: Annotated[Size, "batches that a validation loss averages (batches)"]
    checkpoint_every: Annotated[Size, "how often a checkpoint is written (steps)"]
    keep_checkpoints: Annotated[Size, "how many of the newest checkpoints stay (checkpoints)"]
    resume: Annotated[str, 'a checkpoint, or the folder of a run, to continue from; "" starts a new run']
    output: Annotated[str, 'folder of the run; "" makes a new folder in runs/']
    sample_bytes: Annotated[Count, "length of the text to write at the end; 0 for none (bytes)"]
    compare: Annotated[bool, "whether to end with a table of eager against fused"]
    device: Annotated[str, "auto (a GPU where there is one), cpu, or one GPU, such as cuda:0"]
    log: Annotated[tuple[Literal["tensorboard"], ...], "where the numbers go besides metrics.csv: [] or [tensorboard]"]

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]+(:[0-9]+)?", self.device):
            raise ValueError(
                "train.device must be auto (a GPU where there is one), cpu, or one GPU, such as cuda:0, "
                f"got {shown(self.device)}"
            )
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate must be at most train.learning_rate, {self.learning_rate}, "
                f"got {self.min_learning_rate}; lower it too"
            )


@_section("data")
@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on.

    Raises:
        ValueError, TypeError: a value is out of range, or has another type.
    """

    path: Annotated[str, 'a text file or a folder; "" is the source of Python\'s standard library']
    sequence_length: Annotated[Count, "length of a sequence; 0 for the model's context_length (bytes)"]
    held_out: Annotated[
        float, Range(above=0, below=1), "the text held out for validation (share of the files, or of one file's bytes)"
    ]
    suffixes: Annotated[
        tuple[str, ...], "suffixes of the files to read in a folder; [] reads all text files (of Python's library .py)"
    ]


@_section("parallel")
@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a training is spread over the processes that torchrun starts.

    Raises:
        ValueError: a value has another type or is out of range, `checkpointing` is unknown, or `sequence` is set
            without `tp`.
    """

    dp: Annotated[Count, "data parallel: parts of each batch; 0 for as many as the processes allow (groups)"]
    tp: Annotated[Size, "tensor parallel: parts of each layer (processes of a group)"]
    sequence: Annotated[bool, "sequence parallel: a tensor-parallel group splits the tokens of the stream too"]
    shard: Annotated[
        Literal["none", "ddp", "fsdp"],
        "with dp above 1: ddp keeps the weights in every process, fsdp (FSDP2) a part of each",
    ]
    reshard: Annotated[bool, "whether fsdp frees a block's gathered weights after forward: less memory, more sending"]
    checkpointing: Annotated[
        str,
        "what backward recomputes: none, block (each block), selective (all but attention and every second "
        "matrix product), or budget:0.5: the fusion core keeps this share of what default saves",
    ]

    def __post_init__(self) -> None:
        choices = ("none", "block", "selective")
        if self.budget is not None:
            partitioner(self.budget)  # raises for a malformed one
        elif self.checkpointing not in choices:
            raise ValueError(no_such("parallel.checkpointing", self.checkpointing, (*choices, "budget:0.5")))
        if self.sequence and self.tp == 1:
            raise ValueError(
                "parallel.sequence splits the tokens over a tensor-parallel group, but parallel.tp is 1; set "
                "parallel.tp=2 or more, or leave parallel.sequence out"
            )

    @property
    def budget(self) -> str | None:
        """The partitioner that `checkpointing` names, or None."""
        return self.checkpointing if self.checkpointing.startswith("budget") else None


@dataclass(frozen=True)
class Config:
    """A model, its fusion, its training and its data. `compose` makes it.

    A `Choice` names a registered component and holds all of its options. The model's block is a `Choice` too. The
    model's layers are as the caller wrote them.
    """

    model: Choice
    feedforward: Choice
    attention: Choice
    norm: Choice
    residual: Choice
    position: Choice
    fusion: FusionConfig
    train: TrainConfig
    data: DataConfig
    parallel: ParallelConfig


# The sections that are dataclasses. The others name a component.
SECTIONS: Final = {"fusion": FusionConfig, "train": TrainConfig, "data": DataConfig, "parallel": ParallelConfig}

# A choice in these groups names a file or a registered component, so `feedforward=mine` needs no YAML.
COMPONENT_GROUPS: Final = ("feedforward", "attention", "norm", "residual", "position")
# The sections that name a component.
COMPONENT_SECTIONS: Final = ("model", *COMPONENT_GROUPS)
GROUPS: Final = (*COMPONENT_SECTIONS, *SECTIONS)


def check_group(group: str) -> None:
    """Raise ValueError, with the nearest name, if there is no such group."""
    if group not in GROUPS:
        raise ValueError(no_such("config group", group, GROUPS, elsewhere=paths_with(group)))


def paths_with(option: str, *, without: str = "") -> list[str]:
    """Return the paths of the options with this name, or with ours for it, in every section but one. For error texts.

    >>> paths_with("num_layers"), paths_with("lr")
    (['model.num_layers'], ['train.learning_rate'])
    """
    known = {group: {*described(SECTIONS[group])} for group in SECTIONS}
    known |= {group: {key for name in names(group) for key in options_of(group, name)} for group in COMPONENT_SECTIONS}
    for wanted in (option, *ours_for(option)):
        paths = [f"{group}.{wanted}" for group in GROUPS if group != without and wanted in known[group]]
        if paths:
            return paths
    return []


def changed(
    kind: str,
    section: dict[str, Any],
    changes: str | dict[str, Any],
    *,
    where: str,
    notes: list[str] | None = None,
    merged: bool = False,
) -> dict[str, Any]:
    """Return a section with changes applied. Files, a saved config and overrides are all applied in this way.

    Another `name` starts from the defaults of that component and takes over each set option that it has. An option is
    set if its value is not the default. Unknown options stay, for `finished` to judge.

    Args:
        kind: the kind of the component.
        section: the section before the changes; it may be empty.
        changes: a name, a section, or options without a name.
        where: the path of the section, for error texts and notes.
        notes: a list that gets one line per swap: the options that it drops, and the defaults that change.
        merged: whether Hydra merged the changes from several files. If so, options of another component are dropped:
            llama_tiny.yaml sets multiple_of for its gated_mlp, also with feedforward=mlp.

    Raises:
        ValueError: no such component.

    >>> notes = []
    >>> section = changed("feedforward", {}, {"name": "mlp", "dropout": 0.5}, where="feedforward")
    >>> changed("feedforward", section, {"name": "gated_mlp"}, where="feedforward", notes=notes)["dropout"]
    0.5
    >>> notes[0][:69]
    'feedforward=gated_mlp replaces mlp: by default expansion=2.667 (was 4'
    """
    notes = [] if notes is None else notes
    changes = {"name": changes} if isinstance(changes, str) else changes
    name = changes.get("name", section.get("name"))
    if not isinstance(name, str):
        raise ValueError(f"{where} must name a {kind}, got {shown(name)}; there are: {', '.join(names(kind))}")
    if section.get("name", name) != name:
        section, note = _swapped(kind, section, name, changes)
        notes += [f"{where}={name} replaces {note}"] if note else []
    options, result = options_of(kind, name), {**_defaults(kind, name), **section}
    for key, value in changes.items():
        path = f"{where}.{key}"
        is_known = key in result or key in options
        if merged and not is_known and any(key in options_of(kind, other) for other in names(kind)):
            notes.append(f"{where}: {name} has no option {key}, so {key}={_in_a_note(value)} is dropped")
            continue
        if isinstance(value, (str, dict)) and key in options and (inner := options[key].holds):
            before = result.get(key) or {}
            # A default that nobody set is replaced without a note.
            noted = notes if before != _defaults(kind, name).get(key) else None
            value = changed(inner, before, value, where=path, notes=noted, merged=merged)
        result[key] = value
    return result


def _swapped(kind: str, section: dict[str, Any], name: str, changes: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Return the options of a section that another component takes over, and what else changes, in words."""
    old, new = _defaults(kind, section["name"]), _defaults(kind, name)
    kept, lost = {}, []
    for key, value in section.items():
        if key == "name" or value == old.get(key, _ABSENT):
            continue
        if key in options_of(kind, name) or key not in options_of(kind, section["name"]):
            kept[key] = value
        else:
            lost.append(f"{key}={_in_a_note(value)}")
    parts = [
        f"{key}={_in_a_note(value)} (was {_in_a_note(old[key])})"
        for key, value in new.items()
        if key in old and value != old[key] and key not in {"name", *kept, *changes}
    ]
    said = [f"by default {', '.join(parts)}"] if parts else []
    said += [f"dropped {', '.join(lost)}, which {name} does not have"] if lost else []
    return kept, f"{section['name']}: {'; '.join(said)}" if said else ""


def together(kind: str, changes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the changes of a section merged into one. Of two changes of one path the last one wins.

    An inner component is chosen before its options are set, in whichever order they come.
    """
    holders = {key for name in names(kind) for key, option in options_of(kind, name).items() if option.holds}
    sections = [
        {key: {"name": value} if isinstance(value, str) and key in holders else value for key, value in change.items()}
        for change in changes
    ]
    merged: dict[str, Any] = OmegaConf.to_container(OmegaConf.merge({}, *sections), resolve=False)  # type: ignore
    return merged


def _defaults(kind: str, name: str) -> dict[str, Any]:
    """Return the section of a component with its defaults, as plain values, without required options."""
    section: dict[str, Any] = {"name": name}
    for key, option in options_of(kind, name).items():
        if isinstance(option.default, (str, Choice)) and (inner := option.holds):
            default = option.default if isinstance(option.default, str) else plain_copy(option.default)
            section[key] = changed(inner, {}, default, where=key)
        elif option.default is not REQUIRED:
            section[key] = list(option.default) if isinstance(option.default, tuple) else option.default
    return section


def _in_a_note(value: Any) -> str:
    """Return a value as text for the log: a component by its name, a number with four digits."""
    if isinstance(value, dict) and "name" in value:
        return str(value["name"])
    return f"{value:.4g}" if isinstance(value, float) else shown(value)


def finished(sections: dict[str, dict[str, Any]]) -> Config:
    """Return the config of all sections, with references resolved, and each option judged.

    Raises:
        ValueError: an option is missing, is unknown, has another type or is out of range; or a reference names an
            unknown option, a section, a list, or itself.
    """
    tree = OmegaConf.create(sections)
    plain = {name: _resolved(section, name, tree) for name, section in sections.items()}
    parts: dict[str, Any] = {kind: _choice(kind, plain[kind], kind) for kind in COMPONENT_SECTIONS}
    for name, section in SECTIONS.items():
        known = described(section)
        # OmegaConf's mark of a missing value
        values = {key: value for key, value in plain[name].items() if value != "???"}

        def unknown(key: str, name: str = name, known: Any = known) -> str:
            return no_such(f"{name} option", key, known, elsewhere=paths_with(key, without=name))

        parts[name] = construct(section, **judged(values, known, owner=name, where=name, unknown=unknown))
    config = Config(**parts)
    with_layer_changes(config)  # raises for a wrong layer before anything is built
    return config


def _resolved(value: Any, where: str, tree: DictConfig) -> Any:
    """Return a value with each `${section.option}` replaced by the value of that option."""
    if isinstance(value, dict):
        return {key: _resolved(entry, f"{where}.{key}", tree) for key, entry in value.items()}
    if isinstance(value, list):
        return [_resolved(entry, f"{where}[{index}]", tree) for index, entry in enumerate(value)]
    if not isinstance(value, str) or not (reference := REFERENCE.fullmatch(value)):
        return value
    try:
        named = OmegaConf.select(tree, reference[1], default=_ABSENT)
    except InterpolationKeyError:
        named = _ABSENT
    except InterpolationResolutionError as error:
        raise ValueError(f"{where} refers to itself, through {value}; give it a value") from error
    if named is _ABSENT:
        raise ValueError(f"{where} refers to {value}, which this config does not have")
    # OmegaConf would copy lists, and lists of references to lists of references grow without bound.
    if isinstance(named, Container):
        raise ValueError(f"{where} refers to {value}, which is not a single value")
    return named


def _choice(kind: str, section: dict[str, Any], where: str) -> Choice:
    """Return a section as a `Choice` of judged options."""
    options = options_of(kind, section["name"])
    values = {key: value for key, value in section.items() if key != "name"}
    for key, option in options.items():
        if isinstance(values.get(key), dict) and (inner := option.holds):
            values[key] = _choice(inner, values[key], f"{where}.{key}")
        elif kind == "model" and key in _LAYER_OPTIONS:
            values[key] = () if values[key] == [] else _layers_as_written(values[key], where=f"{where}.{key}")

    def unknown(key: str) -> str:
        return no_option(kind, section["name"], key, elsewhere=paths_with(key, without=kind))

    owner = f"{kind} {section['name']!r}"
    values = judged(values, options, owner=owner, where=where, unknown=unknown)
    return Choice(section["name"], values, judged=values)


# Note: [layers as written]
# A config holds the entries of `model.layers` as they were written. They are completed when a model is built. Completed
# entries would hide an override of a saved config: attention.soft_cap=null must also apply to the layers that differ.


def _layers_as_written(entries: Any, *, where: str) -> tuple[dict[str, Any], ...]:
    """Return the entries of `model.layers` as they were written, with each `at` as text."""
    if not isinstance(entries, (list, tuple)):
        raise ValueError(f"{where} must be a list of mappings {{at: ..., component: ...}}, got {shown(entries)}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or type(entry.get("at")) not in (int, str) or len(entry) < 2:
            raise ValueError(
                f"{where}[{index}] must say at which layers, by an index or a slice (0, 1::2), and what changes: "
                f"{{at: 1::2, feedforward: ...}}, got {shown(entry)}"
            )
        for kind in entry.keys() - {"at", *PARTS}:
            raise ValueError(no_such(f"component in {where}[{index}]", kind, PARTS))
    return tuple({**entry, "at": str(entry["at"])} for entry in entries)


def with_layer_changes(config: Config) -> Choice:
    """Return the `Choice` of a config's model, with its layers as `LayerChange`s of judged components.

    An entry changes a component in the same way as an override.

    Raises:
        ValueError: no such component or option; or an option has another type or is out of range.
    """
    model = config.model
    changes = {
        option: tuple(_layer_change(config, entry, f"model.{option}[{index}]") for index, entry in enumerate(entries))
        for option in _LAYER_OPTIONS
        if (entries := model.options.get(option))
    }
    return replace(model, options={**model.options, **changes}) if changes else model


def _layer_change(config: Config, entry: dict[str, Any], where: str) -> LayerChange:
    choices: dict[str, Choice] = {}
    for kind, change in entry.items():
        if kind == "at":
            continue
        path = f"{where}.{kind}"
        # The block is an option of the model. The other components are sections.
        base = config.model.options.get("block") if kind == "block" else getattr(config, kind)
        if not isinstance(change, (str, dict)):
            raise ValueError(f"{path} must be a name or a mapping of options, got {shown(change)}")
        try:
            before = {} if base is None else plain_copy(base)
            choices[kind] = _choice(kind, changed(kind, before, change, where=path), path)
        except ValueError as error:
            # Some errors do not name the path, and only some layers have this component.
            raise ValueError(str(error) if path in str(error) else f"{path}: {error}") from error
    return LayerChange(entry["at"], **choices)
