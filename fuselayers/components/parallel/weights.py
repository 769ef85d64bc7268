"""weights -- how a module of a divided model reads its parameters.

Each parameter is a `DTensor` with its old name and whole shape, in `named_parameters` and in a state_dict. An attribute
such as `module.weight` returns the tensor that this process computes with: its part, or the whole. So the code of the
components does not change.

A parameter is stored, and read, in one of these ways:

    part     cut along a dimension                  its part, for example of a matrix's columns or rows
    packed   cut along the first dimension          its part of each of the packed matrices: the rows are sent to the
                                                    processes that compute with them, 1 / n of the matrix each
    table    cut along the first dimension          the whole: gathered, and the sum of the gradients scattered
    copy     on every process                       the whole; the gradients are summed
    first    on every process                       the whole on the first process, zeros on the others: a term of a sum
"""

import functools
from dataclasses import dataclass
from typing import Any, Literal, cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from ...module_class import subclass
from .collectives import Group, exchanged, gathered, of_all

Kind = Literal["part", "packed", "table", "copy", "first"]


@dataclass(frozen=True)
class Storage:
    """How a parameter is stored and read.

    Args:
        kind: see the table of this module.
        dim: the dimension that is cut.
        sizes: of the packed matrices along this dimension.
    """

    kind: Kind
    dim: int = 0
    sizes: tuple[int, ...] = ()

    @property
    def placement(self) -> Placement:
        """The placement of the `DTensor`'s elements."""
        return Replicate() if self.kind in ("copy", "first") else Shard(self.dim)

    def read(self, parameter: Tensor, group: Group) -> Tensor:
        """Return the tensor that this process computes with."""
        local = cast(DTensor, parameter).to_local()
        if self.kind == "packed":
            return exchanged(local, self.sizes, group)
        if self.kind == "table":
            return gathered(local, 0, parameter.shape[0], group)
        if self.kind == "part":
            return local
        whole = of_all(local, group)
        # A product rather than new zeros, so that every process has a gradient to sum.
        return whole * float(group.rank == 0) if self.kind == "first" else whole


def distribute(module: nn.Module, storages: dict[str, Storage], mesh: DeviceMesh, group: Group) -> None:
    """Replace parameters of a module by `DTensor`s, and make its attributes read them by their storage."""
    for name, storage in storages.items():
        parameter = module._parameters[name]
        assert parameter is not None
        # All processes get the values of the first. On the meta device there is nothing to send.
        source = None if parameter.is_meta else 0
        stored = distribute_tensor(parameter.detach(), mesh, [storage.placement], src_data_rank=source)
        module._parameters[name] = nn.Parameter(stored, requires_grad=parameter.requires_grad)
    module.__dict__["storages"] = storages
    module.__dict__["group"] = group
    cls: Any = type(module)
    module.__class__ = _reading(cls, *sorted(storages))


# One class for all modules of a kind: compilers guard on a module's class, and would compile each module separately.
@functools.cache
def _reading(cls: Any, *names: str) -> Any:
    """Return a subclass whose attributes of these names are read through their storage."""
    return subclass(cls, {name: _property(name) for name in names}, mark="divided_from", make=_reading, arguments=names)


def _property(name: str) -> property:
    def read(module: nn.Module) -> Tensor | None:
        parameter = module._parameters[name]
        # FSDP shards a parameter over a second dimension of the mesh. It looks parameters up by these attributes, and
        # replaces them by unsharded parameters before anything is computed.
        if parameter is None or cast(DTensor, parameter).device_mesh.ndim > 1:
            return parameter
        storages: dict[str, Storage] = module.__dict__["storages"]
        return storages[name].read(parameter, module.__dict__["group"])

    return property(read)
