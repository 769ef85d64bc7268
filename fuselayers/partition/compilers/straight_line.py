"""straight_line -- a graph as one Python function without a look-up or a branch in it."""

from collections.abc import Callable
from typing import Any

import torch.fx as fx

from ..._torch.tracing import direct_call, mark_boxed

__all__ = ["straight_line"]


def straight_line(graph_module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """Return a function that runs the graph op by op, as AOTAutograd wants it: it takes its arguments as one list,
    which it empties, and drops each value after its last use.

    fx's own code looks up `torch.ops.aten.add.Tensor` anew for every op and goes through a Python method to call it:
    0.4 us an op, 20-30 us in a layer's step.
    """
    graph = graph_module.graph
    names: dict[str, Any] = {}
    lines: list[str] = []

    def constant(value: Any) -> str:
        name = f"constant_{len(names)}"
        names[name] = value
        return name

    def name_of(node: fx.Node) -> str:
        return f"value_{node.name}"  # an op may be called `arguments`, or `constant`

    def text(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return name_of(argument)
        if isinstance(argument, list):
            return f"[{', '.join(map(text, argument))}]"
        if type(argument) is tuple:
            return f"({''.join(text(item) + ', ' for item in argument)})"
        if isinstance(argument, dict):
            return f"{{{', '.join(f'{text(key)}: {text(value)}' for key, value in argument.items())}}}"
        if isinstance(argument, slice):
            return f"slice({text(argument.start)}, {text(argument.stop)}, {text(argument.step)})"
        # inf and nan have no literal, and what else there is (dtypes, devices) has a name only somewhere.
        return repr(argument) if argument is None or type(argument) in (bool, int, str) else constant(argument)

    last_reader = {source: node for node in graph.nodes for source in node.all_input_nodes}
    inputs = [name_of(node) for node in graph.find_nodes(op="placeholder")]
    if inputs:
        lines += [f"{', '.join(inputs)}, = arguments", "arguments.clear()"]
    unread = [name_of(node) for node in graph.find_nodes(op="placeholder") if node not in last_reader]
    if unread:
        lines.append(f"del {', '.join(unread)}")
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {text(node.args[0])}")
            continue
        if node.op == "get_attr":
            lines.append(f"{name_of(node)} = {constant(_attribute(graph_module, node.target))}")
        elif node.op == "call_function":
            arguments = [*map(text, node.args), *(f"{name}={text(value)}" for name, value in node.kwargs.items())]
            call = f"{constant(direct_call(node.target))}({', '.join(arguments)})"
            lines.append(f"{name_of(node)} = {call}" if node in last_reader else call)
        dead = [name_of(source) for source in node.all_input_nodes if last_reader[source] is node]
        if dead:
            lines.append(f"del {', '.join(dead)}")
    source = "def run(arguments):\n    " + "\n    ".join(lines)
    exec(compile(source, f"<straight line of {type(graph_module).__name__}>", "exec"), names)
    return mark_boxed(names["run"])


def _attribute(graph_module: fx.GraphModule, path: str) -> Any:
    value: Any = graph_module
    for name in path.split("."):
        value = getattr(value, name)
    return value
