"""build -- from a config to a model."""

from collections.abc import Sequence

from torch import nn

from ..components import accepted, create, get, names
from ..partition import fuse
from .compose import compose
from .folders import COMPONENT_GROUPS
from .layers import with_layer_changes
from .schemas import Config, FusionConfig
from .source import Source, plain_sections

__all__ = ["build"]


def build(source: Source = "gpt_nano", overrides: Sequence[str] = ()) -> nn.Module:
    """Return the model that a config describes, fused as its section `fusion` says.

    Its state_dict has the plain model's keys at every scope. The attribute `built_from` of the model, and of no module
    in it, is the `Config`, for `rebuild`. Under `torch.device("meta")` it is built without memory.

    Args:
        source: the name of a shipped model, the path of a .yaml file, a mapping or a `Config`, as for `compose`.
        overrides: of the config, as for `compose`.

    Raises:
        TypeError, OSError, ValueError: as `compose`; or a component refuses an option's value.

    >>> model = build("gpt_nano", ["feedforward=fused_mlp", "fusion=off", "model.num_layers=1"])
    >>> type(model).__name__, type(model.blocks[0].feedforward).__name__
    ('Decoder', 'FusedMLP')
    """
    config = source if isinstance(source, Config) and not overrides else compose(source, overrides)
    fusion = config.fusion
    layers = (
        accepted("model", config.model, backend=fusion.backend, partition=fusion.partition)
        if fusion.scope == "layer"
        else {}
    )
    model: nn.Module = create(
        "model",
        with_layer_changes(config.model, plain_sections(config)),
        **{group: getattr(config, group) for group in COMPONENT_GROUPS},
        **layers,
    )
    # Not through nn.Module's own way to set an attribute, which is for parameters and modules.
    vars(model)["built_from"] = config
    if fusion.scope == "block":
        _fuse_blocks(model, fusion)
    if fusion.scope == "model":
        return fuse(model, backend=fusion.backend, partition=fusion.partition)
    return model


def _fuse_blocks(model: nn.Module, fusion: FusionConfig) -> None:
    blocks = tuple(get("block", name) for name in names("block"))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, blocks):
                parent.add_module(name, fuse(child, backend=fusion.backend, partition=fusion.partition))
