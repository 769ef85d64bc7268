"""create -- the plain model of a config, before blocks or the model are fused. Used by build and memory."""

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
