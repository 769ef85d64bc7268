"""The config as dataclasses. The numbers are in the YAML groups; types, ranges and meanings are here."""

import re
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Annotated, Any, Final, Literal, get_type_hints

from ..components import Choice
from ..components.ranges import Count, NotNegative, Positive, Probability, Range, Size, range_of
from ..partition import partitioner
from ..partition.backends import check_backends
from .values import checked

__all__ = ["SECTIONS", "Config", "DataConfig", "FusionConfig", "Setting", "TrainConfig", "setting", "settings_of"]


@dataclass(frozen=True)
class Setting:
    """One field of a section: its meaning, its unit, its type and its limits.

    Attributes:
        doc: the meaning, in words.
        unit: what a number counts or measures; "" for a pure number and for other types.
        annotation: the type, without the range.
        range: the bounds of a number.
        pattern: a regular expression that a text must match as a whole.
    """

    doc: str
    unit: str = ""
    annotation: Any = None
    range: Range | None = None
    pattern: str | None = None


def setting(doc: str, *, unit: str = "", default: Any = MISSING, pattern: str | None = None) -> Any:
    """Return a dataclass field that `settings_of` reads. Its type and range are in its annotation."""
    return field(default=default, metadata={"setting": Setting(doc, unit=unit, pattern=pattern)})


def settings_of(section: type) -> dict[str, Setting]:
    """Return the `Setting` of each field.

    >>> steps = settings_of(TrainConfig)["steps"]
    >>> steps.doc, steps.unit, str(steps.range)
    ('updates of the weights', 'steps', 'at least 1')
    """
    types, annotations = get_type_hints(section), get_type_hints(section, include_extras=True)
    return {
        entry.name: replace(
            entry.metadata["setting"], annotation=types[entry.name], range=range_of(annotations[entry.name])
        )
        for entry in fields(section)
    }


def _check_settings(name: str, section: Any) -> None:
    """Check every field of a frozen section by its annotation and its `setting`; `__post_init__` calls it.

    A whole number becomes a float where a float is wanted, and a list becomes a tuple.

    Raises:
        ValueError: names the field, what it may be, and what came.
    """
    for option, about in settings_of(type(section)).items():
        where = f"{name}.{option}"
        value = checked(where, getattr(section, option), about.annotation)
        if about.range is not None and value is not None:
            about.range.check(where, value)
        if about.pattern is not None and not re.fullmatch(about.pattern, value):
            raise ValueError(f"{where} must be {about.doc}, got {value!r}")
        object.__setattr__(section, option, value)


@dataclass(frozen=True)
class FusionConfig:
    """How much of a model goes through the fusion core, and how.

    Raises:
        ValueError: an unknown backend, partitioner or scope.

    >>> FusionConfig(scope="block").backend
    'auto'
    """

    backend: str = setting("what compiles the two graphs, as `fuse` takes it", default="auto")
    partition: str = setting(
        "how `fuse` chooses what is saved for backward: min_cut, default, budget:0.5 (a share), budget:9000 (bytes)",
        default="min_cut",
    )
    scope: Literal["none", "layer", "block", "model"] = setting(
        "what is fused as one: nothing, each feedforward's op, each block, or the whole model", default="model"
    )

    def __post_init__(self) -> None:
        _check_settings("fusion", self)
        check_backends(self.backend, ())
        partitioner(self.partition)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Raises:
        ValueError: a value of another type or out of its range.
    """

    steps: Size = setting("updates of the weights", unit="steps")
    batch_size: Size = setting("sequences in a micro-batch", unit="sequences")
    accumulate: Size = setting("micro-batches whose gradients make one step", unit="micro-batches")
    learning_rate: Positive = setting("the highest one, after the warm-up", unit="per step")
    min_learning_rate: NotNegative = setting("the one of the last step, at the end of the cosine", unit="per step")
    warmup_steps: Count = setting("how long the learning rate rises from zero", unit="steps")
    weight_decay: NotNegative = setting("AdamW's, on matrices only", unit="per unit of learning rate")
    beta1: Probability = setting("AdamW's decay of the mean gradient", unit="per step")
    beta2: Probability = setting("AdamW's decay of the mean squared gradient", unit="per step")
    clip_norm: NotNegative = setting("the largest norm of the gradient; 0 does not clip")
    precision: Literal["float32", "bfloat16"] = setting("bfloat16 runs matmuls under autocast; weights stay float32")
    seed: Annotated[int, Range(minimum=0, below=2**63)] = setting("of weights, batches and dropout")
    evaluate_every: Size = setting("how often the validation loss is measured", unit="steps")
    evaluate_batches: Size = setting("what a validation loss is the mean of", unit="batches")
    checkpoint_every: Size = setting("how often a checkpoint is written", unit="steps")
    resume: str = setting('a checkpoint, or the folder of a run, to continue from; "" begins anew')
    output: str = setting('folder of the run; "" makes a new one below runs/')
    sample_bytes: Count = setting("length of the text to write at the end; 0 for none", unit="bytes")
    compare: bool = setting("whether to end with a table of eager against fused")
    device: str = setting("auto (a GPU where there is one), cpu, or one GPU as cuda:0", pattern=r"[a-z]+(:[0-9]+)?")

    def __post_init__(self) -> None:
        _check_settings("train", self)
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate must be at most train.learning_rate, {self.learning_rate}, "
                f"got {self.min_learning_rate}; lower it too"
            )


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The text to train on.

    Raises:
        ValueError: a value of another type or out of its range.
    """

    path: str = setting('a text file or a folder; "" is the source of Python\'s standard library')
    sequence_length: Count = setting("length of a sequence; 0 for the model's context_length", unit="bytes")
    held_out: Annotated[float, Range(above=0, below=1)] = setting(
        "what is kept for validation", unit="share of the files, or of one file's bytes"
    )
    suffixes: tuple[str, ...] = setting("what the names of a folder's files end in")

    def __post_init__(self) -> None:
        _check_settings("data", self)


@dataclass(frozen=True)
class Config:
    """A model, how it is fused, and how it is trained, on what. Made by `compose`.

    Attributes:
        model: the registered model with every option, its block as a choice of its own, its layers as asked for.
        feedforward: the registered feedforward with every option.
        attention: the registered attention with every option.
        norm: the registered norm with every option.
        residual: the registered residual style with every option.
        position: the registered kind of position with every option.
        fusion: how much of it goes through the fusion core.
        train: the training run.
        data: the text to train on.
        left_at_default: the paths of the components' options that nobody wrote, such as "feedforward.expansion". A swap
            gives them the new component's default, and keeps the others.
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
    # Two configs with the same values build the same model, whoever wrote the values.
    left_at_default: frozenset[str] = field(default=frozenset(), compare=False)


# The sections that are dataclasses of their own; the others name a component.
SECTIONS: Final = {"fusion": FusionConfig, "train": TrainConfig, "data": DataConfig}
