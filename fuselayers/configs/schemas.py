"""The config as dataclasses, and the checks of values against types and ranges.

The values are in the YAML groups. Types, ranges and meanings are here and in the components' signatures.
"""

import re
import sys
import types
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from ..components import REQUIRED, Choice, Option, get
from ..components.fused_op import check_names
from ..components.ranges import Count, Decay, NotNegative, Positive, Range, Size, range_of
from ..names import no_such, shown
from ..partition import partitioner

_WORDS: Final = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): "null"}
_INTEGERS_BELOW: Final = 2**63  # torch's sizes


def checked_option(where: str, value: Any, option: Option) -> Any:
    """Return the value of an option, checked against its annotation and its range.

    Raises:
        ValueError: the value has another type, is out of range, or names no registered component.
    """
    value = _checked(where, value, option.annotation)
    if isinstance(value, int) and abs(value) >= _INTEGERS_BELOW:
        raise ValueError(f"{where} must be below 2**63, got {shown(value)}")
    if option.range is not None and value is not None:
        option.range.check(where, value)
    if option.kind is not None and isinstance(value, str):
        get(option.kind, value)
    return value


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union; for any other annotation, the annotation alone."""
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _checked(where: str, value: Any, annotation: Any) -> Any:
    """Return the value converted to its annotation: an int to a float, a list to a tuple.

    It checks bool, int, float, str, None, Literal, tuples of any length, and unions. The component checks other types.
    """
    wanted = alternatives(annotation)
    for alternative in wanted:
        if not _fits(value, alternative):
            continue
        if _is_any_length(alternative):
            entry = get_args(alternative)[0]
            return tuple(_checked(f"{where}[{index}]", item, entry) for index, item in enumerate(value))
        return float(value) if alternative is float else value
    literals = [name for alternative in wanted if get_origin(alternative) is Literal for name in get_args(alternative)]
    if literals and isinstance(value, str):
        raise ValueError(no_such(where, value, literals))
    hint = ""
    if str in wanted and isinstance(value, (bool, int, float)):
        hint = "; quote it to make it text, with two pairs of quotes on a command line"
    elif isinstance(value, str) and any(map(_is_any_length, wanted)):
        hint = f"; write [{value}]"
    words = [_WORDS.get(alternative, "a list") for alternative in wanted if get_origin(alternative) is not Literal]
    words += [f"one of {', '.join(map(str, literals))}"] if literals else []
    raise ValueError(f"{where} must be {' or '.join(words)}, got {shown(value)}{hint}")


def _fits(value: Any, wanted: Any) -> bool:
    if get_origin(wanted) is Literal:
        return any(type(value) is type(name) and value == name for name in get_args(wanted))
    if _is_any_length(wanted):
        return isinstance(value, (list, tuple))
    if wanted is float:  # it must be finite, and an int may be too large for a float
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return wanted not in _WORDS or type(value) is wanted


def _is_any_length(annotation: Any) -> bool:
    return get_origin(annotation) is tuple and get_args(annotation)[1:] == (Ellipsis,)


def setting(doc: str, *, default: Any = MISSING) -> Any:
    """Return a dataclass field with its meaning. The annotation holds its type and range."""
    return field(default=default, metadata={"doc": doc})


def section_options(section: type) -> tuple[Option, ...]:
    """Return the fields of a section as `Option`s, as the registry does for a component."""
    types, annotations = get_type_hints(section), get_type_hints(section, include_extras=True)
    return tuple(
        Option(
            name=entry.name,
            annotation=types[entry.name],
            default=REQUIRED if entry.default is MISSING else entry.default,
            doc=entry.metadata["doc"],
            range=range_of(annotations[entry.name]),
        )
        for entry in fields(section)
    )


def _check(name: str, section: Any) -> None:
    """Check and convert every field of a frozen section."""
    for option in section_options(type(section)):
        value = checked_option(f"{name}.{option.name}", getattr(section, option.name), option)
        object.__setattr__(section, option.name, value)


@dataclass(frozen=True)
class FusionConfig:
    """How much of a model is fused, and how.

    Raises:
        ValueError: an unknown backend, partitioner, compression or scope.
    """

    backend: str = setting("the compiler of the two graphs, as `fuse` takes it", default="auto")
    partition: str = setting(
        "how `fuse` chooses what to save for backward: min_cut, default, budget:0.5 (a share), budget:2GB (bytes), "
        "budget:peak:2GB (the most that forward and backward hold at once)",
        default="min_cut",
    )
    compress: str | None = setting(
        "large saved values in fewer bits: int8, float8 or bfloat16; null is exact", default=None
    )
    scope: Literal["none", "block", "model"] = setting(
        "what is fused as one function: none, each block, or the whole model", default="block"
    )
    cuda_graphs: bool = setting("on a GPU, run forward and backward as CUDA graphs; with scope=model", default=False)

    def __post_init__(self) -> None:
        _check("fusion", self)
        if self.cuda_graphs and self.scope != "model":
            raise ValueError(
                f"fusion.cuda_graphs needs fusion.scope=model, got {self.scope}; a graph of each block would copy its "
                "results"
            )
        check_names(self.backend, self.partition, compress=self.compress)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Raises:
        ValueError: a value has another type or is out of range.
    """

    steps: Size = setting("updates of the weights (steps)")
    batch_size: Size = setting("sequences in a micro-batch (sequences)")
    accumulate: Size = setting("micro-batches whose gradients make one step (micro-batches)")
    learning_rate: Positive = setting("the highest rate, after the warm-up (per step)")
    min_learning_rate: NotNegative = setting("the rate of the last step, at the end of the cosine (per step)")
    warmup_steps: Count = setting("how long the learning rate rises from zero (steps)")
    weight_decay: NotNegative = setting("weight decay of AdamW, on matrices only (per unit of learning rate)")
    beta1: Decay = setting("decay of AdamW's mean gradient (per step)")
    beta2: Decay = setting("decay of AdamW's mean squared gradient (per step)")
    clip_norm: NotNegative = setting("the largest norm of the gradient; 0 does not clip")
    precision: Literal["float32", "bfloat16"] = setting("bfloat16 runs matmuls under autocast; weights stay float32")
    seed: Annotated[int, Range(minimum=0, below=2**63)] = setting("seed of weights, batches and dropout")
    evaluate_every: Size = setting("how often the validation loss is measured (steps)")
    evaluate_batches: Size = setting("batches that a validation loss averages (batches)")
    checkpoint_every: Size = setting("how often a checkpoint is written (steps)")
    keep_checkpoints: Size = setting("how many of the newest checkpoints stay (checkpoints)")
    resume: str = setting('a checkpoint, or the folder of a run, to continue from; "" starts a new run')
    output: str = setting('folder of the run; "" makes a new folder in runs/')
    sample_bytes: Count = setting("length of the text to write at the end; 0 for none (bytes)")
    compare: bool = setting("whether to end with a table of eager against fused")
    device: str = setting("auto (a GPU where there is one), cpu, or one GPU, such as cuda:0")
    log: tuple[Literal["tensorboard"], ...] = setting("where the numbers go besides metrics.csv: [] or [tensorboard]")

    def __post_init__(self) -> None:
        _check("train", self)
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


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on.

    Raises:
        ValueError: a value has another type or is out of range.
    """

    path: str = setting('a text file or a folder; "" is the source of Python\'s standard library')
    sequence_length: Count = setting("length of a sequence; 0 for the model's context_length (bytes)")
    held_out: Annotated[float, Range(above=0, below=1)] = setting(
        "the text held out for validation (share of the files, or of one file's bytes)"
    )
    suffixes: tuple[str, ...] = setting(
        "suffixes of the files to read in a folder; [] reads all text files (of Python's library .py)"
    )

    def __post_init__(self) -> None:
        _check("data", self)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a training is spread over the processes that torchrun starts.

    Raises:
        ValueError: a value has another type or is out of range, `checkpointing` is unknown, or `sequence` is set
            without `tp`.
    """

    dp: Count = setting("data parallel: parts of each batch; 0 for as many as the processes allow (groups)")
    tp: Size = setting("tensor parallel: parts of each layer (processes of a group)")
    sequence: bool = setting("sequence parallel: a tensor-parallel group splits the tokens of the stream too")
    shard: Literal["none", "ddp", "fsdp"] = setting(
        "with dp above 1: ddp keeps the weights in every process, fsdp (FSDP2) a part of each"
    )
    reshard: bool = setting("whether fsdp frees a block's gathered weights after forward: less memory, more sending")
    checkpointing: str = setting(
        "what backward recomputes: none, block (each block), selective (all but attention and every second "
        "matrix product), or budget:0.5: the fusion core keeps this share of what default saves"
    )

    def __post_init__(self) -> None:
        _check("parallel", self)
        ways = ("none", "block", "selective")
        if self.checkpointing not in ways and not self.checkpointing.startswith("budget"):
            raise ValueError(no_such("parallel.checkpointing", self.checkpointing, (*ways, "budget:0.5")))
        if self.budget is not None:
            partitioner(self.budget)
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
