"""create -- the plain model of a config, before blocks or the model are fused. Used by build, memory and plan."""

from typing import Any

from torch import nn

from ..components import accepted, create
from .group_files import COMPONENT_GROUPS
from .schemas import Config
from .sections import with_layer_changes


def create_model(config: Config) -> nn.Module:
    """Return the model of a config; its layers are fused where the scope of the fusion is "layer".

    Raises:
        TypeError, ValueError: a component refuses an option's value.
    """
    fusion = config.fusion
    layers = (
        accepted("model", config.model, backend=fusion.backend, partition=fusion.partition)
        if fusion.scope == "layer"
        else {}
    )
    model: nn.Module = create(
        "model", with_layer_changes(config), **{group: getattr(config, group) for group in COMPONENT_GROUPS}, **layers
    )
    return model


def check_described(config: Config, model: Any, *attributes: str) -> None:
    """Raise ValueError unless a model says what it is called with, and has the attributes. Used by costs and cli."""
    if not all(hasattr(model, name) for name in ("example_inputs", *attributes)):
        wanted = "".join(f" and an attribute {name}" for name in attributes)
        raise ValueError(
            f"model {config.model.name!r} does not say what it is called with; give {type(model).__name__} a method "
            f'example_inputs(batch_size=1, device="meta"){wanted}'
        )
