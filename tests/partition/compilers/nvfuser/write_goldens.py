"""Write the definitions of the library's ops down, as a GPU would get them, in files that make them again.

    python -m tests.partition.compilers.nvfuser.write_goldens

Run it after a deliberate change of the translation, and read what it changed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fuselayers.partition import fuse
from fuselayers.partition.compilers.nvfuser import availability, definitions
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.library import GOLDEN, Case, as_on_a_gpu
from tests.partition.compilers.nvfuser.replay_goldens import GOLDENS

__all__ = ["golden_of"]


def golden_of(name: str, case: Case, stand_in: StandIn) -> str:
    """The text of a golden file: the definitions of an op's forward and backward, in bfloat16.

    Args:
        name: of the op.
        case: what is called.
        stand_in: where `nvfuser_direct` is imported from; the backend takes CPU tensors for a GPU's.
    """
    definitions.forget_definitions()
    layouts = _noted(stand_in)
    inputs = case.inputs(torch.bfloat16)
    returned = fuse(case.fn, backend="nvfuser", fallback=())(*inputs)
    in_forward = len(stand_in.defined)
    learning = [one for one in inputs if one.requires_grad]
    outputs = [one for one in (returned if isinstance(returned, tuple) else (returned,)) if one.requires_grad]
    if outputs:
        torch.autograd.grad(outputs, learning, [torch.ones_like(one) for one in outputs])
    lines = [f'"""The definitions of {name}, forward and backward; written by write_goldens."""', "", "import torch"]
    regions = []
    for number, definition in enumerate(stand_in.defined):
        side = f"forward_{number}" if number < in_forward else f"backward_{number - in_forward}"
        lines += ["", "", f"def {side}(fd, DataType):"]
        lines += [f"    {line}" for line in definition.script().splitlines()]
        regions.append(f"    ({side}, {layouts[id(definition)]}),")
    return "\n".join([*lines, "", "", "REGIONS = (", *regions, ")", ""])


def _noted(stand_in: StandIn) -> dict[int, list[Any]]:
    """The layouts of the inputs of each definition that will be executed, by its id."""
    layouts: dict[int, list[Any]] = {}

    class Noting(stand_in.FusionDefinition):  # type: ignore[name-defined,misc]
        def execute(self, inputs: Sequence[Any], **options: Any) -> Any:
            layouts[id(self)] = [
                (tuple(one.shape), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one for one in inputs
            ]
            return super().execute(inputs, **options)

    stand_in.FusionDefinition = Noting
    return layouts


if __name__ == "__main__":
    GOLDENS.mkdir(exist_ok=True)
    for one in GOLDEN:
        with pytest.MonkeyPatch.context() as patch:
            module = StandIn()
            patch.setitem(sys.modules, "nvfuser_direct", module)
            patch.setattr(availability, "_DEVICE_TYPES", {"cuda", "cpu"})
            as_on_a_gpu(module, patch)
            (GOLDENS / f"{one}.py").write_text(golden_of(one, GOLDEN[one], module))
