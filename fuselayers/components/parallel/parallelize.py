"""parallelize -- a model divided among the processes of a group: tensor and sequence parallelism.

    x   [B, T, D]   B batch, T tokens, D model; n processes

Each process has 1 / n of the heads and of the hidden values, so 1 / n of the large matrices and of their optimizer
state:

    x = x + sum over the processes of attention(norm(x))
    x = x + sum over the processes of feedforward(norm(x))

With `sequence` it also has only T / n tokens of the residual stream: a sublayer begins with a gather of its tokens and
ends with a reduce-scatter of its results.

A process sends and receives, in elements: for each sublayer 2 (n - 1) / n B T D forward and as much backward, with and
without `sequence`; for each parameter that all processes hold, such as a norm's weight, twice its size backward.
"""

from typing import TYPE_CHECKING

from ..model import Model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def parallelize(model: Model, mesh: "DeviceMesh", *, sequence: bool = False) -> Model:
    """Divide a model among the processes of a tensor-parallel group, in place, and return it.

    Every process of the group calls it with the same model. The parameters become `DTensor`s with their old names and
    whole shapes, so a state_dict, an optimizer, `fully_shard` and `torch.distributed.checkpoint` work as before. Calls
    do not change: every process passes the same batch, and gets the whole loss or the whole logits. `backward` computes
    the gradients of the whole loss.

    The results are those of a single process, up to rounding. With dropout this holds if torch's generators have the
    same state on all processes (`torch.manual_seed` with one number), and no process draws other random numbers: a mask
    is a function of the seed and of the element's position in the whole tensor.

    Call it after the weights are initialised or loaded, and before the first call, activation checkpointing,
    `torch.compile` and `fully_shard`; `fuse` may come before or after. All processes get the weights of the first.

    Args:
        model: a model of this package; it may be on the meta device.
        mesh: the group, with one dimension. For a group of one process the model is returned unchanged.
        sequence: whether the tokens of the residual stream are divided too, which divides the memory of the norms'
            and dropouts' activations. The number of tokens need not be a multiple of the group's size.

    Raises:
        TypeError: the model is not a `Model`, or the mesh not a `DeviceMesh`.
        ValueError: the mesh has several dimensions, the model is divided already, a number of heads or of hidden values
            does not divide by the group's size, or a component has no plan. The model is not changed then.

    >>> import torch
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from fuselayers.components import Choice, Decoder, parallelize
    >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    >>> heads = Choice("multi_head", {"num_heads": 2})
    >>> model = Decoder(vocab_size=10, hidden_dim=8, num_layers=1, context_length=4, attention=heads)
    >>> parallelize(model, init_device_mesh("cpu", (1,))) is model
    True
    >>> torch.distributed.destroy_process_group()
    """
    # Imported here, because torch.distributed takes seconds to import and most programs do not need it.
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from .plan import make_plan

    if not isinstance(model, Model):
        raise TypeError(f"model must be a fuselayers.components.Model, got {type(model).__name__}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh of the tensor-parallel processes, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, got {mesh.ndim}; pass the tensor-parallel dimension, as in mesh['tp']"
        )
    for path, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ValueError(f"{path} is a DTensor already; parallelize a plain model once, and shard it afterwards")
    if mesh.size() == 1:
        return model

    from .collectives import Group
    from .divided import Divided
    from .weights import distribute

    plan = make_plan(model, mesh.size())
    group = Group(mesh.get_group().group_name, rank=mesh.get_local_rank(), size=mesh.size())
    layout = Divided(group, sequence=sequence)
    for module, storages in plan.storages.items():
        distribute(module, storages, mesh, group)
    for module, name, value in plan.numbers:
        setattr(module, name, value)
    for module in plan.layouts:
        module.__dict__["layout"] = layout
    return model
