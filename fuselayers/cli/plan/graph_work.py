"""graph_work -- count forward and backward of a joint graph, as a partitioner cuts it and a compiler fuses it."""

import operator
import re
from collections import Counter
from typing import Any, Final

import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from ...partition import min_cut
from ...partition.cost import flops_of
from ...partition.joint_graph import JointGraph
from ...partition.node_kinds import is_fusible, looks_at_its_input, module_of, num_bytes, storage_of
from ...partition.partitioners import SavePolicy
from .op_work import ATTENTION, exponentials_of, op_work
from .work import Pass, Work

_INSIDE: Final = frozenset({"attention", "cross_attention", "feedforward"})
_NEARLY_NOTHING: Final = 0.1


def cut_pass(joint: JointGraph, policy: SavePolicy, *, hidden_dim: int) -> Pass:
    """Return forward and backward of a graph as `policy` cuts it.

    Args:
        joint: the graph.
        policy: chooses what is saved.
        hidden_dim: the width of the model's stream: values of that width are whole on each rank of a tensor-parallel
            group.
    """
    saved = policy.saved_values(joint, fused=True)
    saved_bytes = float(joint.saved_bytes(saved))
    storages = {storage_of(node) for node in saved} - joint.static_inputs
    sharded = float(sum(num_bytes(node) for node in storages if _is_inside_a_sublayer(node, hidden_dim)))
    forward, backward = policy.split(joint, fused=True)
    working = max(_working_bytes_of_forward(forward), _working_bytes_of_backward(backward, joint))
    return Pass(saved_bytes, sharded, working, _work_of(forward), _work_of(backward))


def selective_pass(joint: JointGraph, *, hidden_dim: int) -> Pass:
    """Return the same under selective checkpointing: of each block its input, the results of attention, and those of
    the first, third, ... matrix product are saved, and backward recomputes the rest.

    What is outside of blocks is left out.
    """
    without = cut_pass(joint, min_cut, hidden_dim=hidden_dim)
    kept = kept_inside = repeated = 0.0
    inputs: dict[str, float] = {}
    products: Counter[str] = Counter()
    for node in joint.nodes:
        block = re.match(r".*?\.\d+(?=\.|$)", module_of(node))
        if block is None or node not in joint.forward or node.op != "call_function" or _is_free(node):
            continue
        value, inside = node.meta.get("val"), _is_inside_a_sublayer(node, hidden_dim)
        if isinstance(value, Tensor) and value.shape[-1:] == (hidden_dim,):
            inputs.setdefault(block[0], num_bytes(node))  # as large as the block's input
        if ATTENTION in str(node.target):
            kept, kept_inside = kept + num_bytes(node), kept_inside + num_bytes(node)
        elif (flops := flops_of(node)) > 0:
            products[block[0]] += 1
            if products[block[0]] % 2 == 0:
                repeated += flops
                continue
            kept += num_bytes(node)
            kept_inside += num_bytes(node) if inside else 0.0
    again = without.forward - Work(without.forward.matmul_flops, without.forward.attention_flops)
    backward = without.backward + again + Work(matmul_flops=repeated)
    return Pass(kept + sum(inputs.values()), kept_inside, without.working_bytes, without.forward, backward)


def _is_inside_a_sublayer(node: fx.Node, hidden_dim: int) -> bool:
    """Whether the value lives between the matrix products of an attention or a feedforward: tensor parallelism leaves a
    part of it on each rank."""
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    within = not _INSIDE.isdisjoint(module_of(node).split("."))
    return within and isinstance(first, Tensor) and first.dim() > 0 and first.shape[-1] != hidden_dim


class _Kernels:
    """Assigns the ops of a graph to kernels: what is fusible and has as many unfused ops before it is one kernel."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.place: dict[fx.Node, int] = {}
        for node in module.graph.nodes:
            self.place[node] = max((self._after(source) for source in node.all_input_nodes), default=0)

    def _after(self, source: fx.Node) -> int:
        runs = source.op == "call_function" and not is_fusible(source) and not _is_free(source)
        return self.place[source] + runs

    def is_written(self, node: fx.Node) -> bool:
        """Whether another kernel, or the caller, takes the value of a fusible op."""
        stack, seen = list(node.users), set()
        while stack:
            user = stack.pop()
            if user in seen:
                continue
            seen.add(user)
            if _is_free(user):
                stack += user.users
            elif not is_fusible(user) or self.place[user] != self.place[node]:
                return True
        return False


def _is_free(node: fx.Node) -> bool:
    return looks_at_its_input(node) or node.target is operator.getitem


def _owner(node: fx.Node) -> fx.Node:
    """The op that made a value: of a view its base, of one of several results the op."""
    while _is_free(node):
        node = node.all_input_nodes[0]
    return node


def _work_of(module: fx.GraphModule) -> Work:
    """Return what a graph does. A kernel reads what it takes from outside once, and writes what others take from it."""
    kernels = _Kernels(module)
    work = Work()
    read: set[tuple[fx.Node, int]] = set()
    places: set[int] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or _is_free(node):
            continue
        args, kwargs, result = map_arg((node.args, node.kwargs, node), _value_of)
        if not is_fusible(node):
            work += op_work(node.target, args, kwargs, result)
            continue
        place = kernels.place[node]
        places.add(place)
        moved = float(num_bytes(node)) if kernels.is_written(node) else 0.0
        for source in node.all_input_nodes:
            owner = _owner(source)
            outside = owner.op != "call_function" or not is_fusible(owner) or kernels.place[owner] != place
            if outside and (owner, place) not in read:
                read.add((owner, place))
                moved += min(num_bytes(owner), max(num_bytes(source), num_bytes(node)))
        work += Work(moved_bytes=moved, exponentials=exponentials_of(node.target, tree_leaves(result)))
    return work + Work(kernels=float(len(places)))


def _value_of(node: fx.Node) -> Any:
    return node.meta.get("val")


def _working_bytes_of_forward(module: fx.GraphModule) -> float:
    """The most bytes alive while forward runs, without its inputs and without what it returns."""
    returned = frozenset(_owner(node) for node in module.graph.output_node().all_input_nodes)
    return _most_alive(module, apart=returned)


def _working_bytes_of_backward(module: fx.GraphModule, joint: JointGraph) -> float:
    """The same of backward, without saved values, weights and gradients of weights.

    The end of backward does not count: other layers' saved values, which are alive before, are freed there.
    """
    static = {node.name for node in joint.nodes if storage_of(node) in joint.static_inputs}
    inputs = module.graph.find_nodes(op="placeholder")
    saved = frozenset(node for node in inputs if node.name not in static)
    gradients = frozenset(_owner(node) for node in module.graph.output_node().all_input_nodes)
    return _most_alive(module, apart=gradients, saved=saved)


def _most_alive(module: fx.GraphModule, *, apart: frozenset[fx.Node], saved: frozenset[fx.Node] = frozenset()) -> float:
    """Return the most bytes alive at one time of the values that ops make, without those `apart`, until nearly all of
    the `saved` bytes are freed."""
    last_use: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        for source in node.all_input_nodes:
            last_use[_owner(source)] = node
    freed_after: dict[fx.Node, list[fx.Node]] = {}
    for owner, node in last_use.items():
        freed_after.setdefault(node, []).append(owner)
    kernels = _Kernels(module)
    left = {node: float(num_bytes(node)) for node in saved}
    enough = _NEARLY_NOTHING * sum(left.values())
    alive: dict[fx.Node, float] = {}
    most = 0.0
    done: list[fx.Node] = []
    for node in module.graph.nodes:
        # A value that exists only inside a kernel takes no memory.
        in_memory = not is_fusible(node) or kernels.is_written(node)
        if node.op == "call_function" and not _is_free(node) and in_memory and node not in apart:
            alive[node] = float(num_bytes(node))
            most = max(most, sum(alive.values()))
        done += freed_after.get(node, ())
        if is_fusible(node) or _is_free(node):
            continue  # the kernel may go on; what it reads is there until its end
        for owner in done:
            alive.pop(owner, None)
            left.pop(owner, None)
        done.clear()
        if saved and sum(left.values()) < enough:
            break
    return most
