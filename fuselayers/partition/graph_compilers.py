"""graph_compilers -- functorch's compilers by their names: each takes one graph of AOTAutograd and returns a callable.

Use them as `fw_compiler` and `bw_compiler` of `aot_function`, or wherever AOTAutograd takes a compiler.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from .._torch.tracing import boxed, compile_one_graph
from ..errors import say_once
from .compilers import why_inductor_is_unavailable


def print_compile(fx_g: fx.GraphModule, _: Any) -> fx.GraphModule:
    """Print the graph's code, and return the graph to run as it is.

    >>> graph = fx.symbolic_trace(lambda x: x.sin())
    >>> print_compile(graph, [torch.ones(2)]) is graph
    <BLANKLINE>
    <BLANKLINE>
    <BLANKLINE>
    def forward(self, x):
        sin = x.sin();  x = None
        return sin
    <BLANKLINE>
    True
    """
    print(fx_g.code)
    return fx_g


def ts_compile(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Callable[[list[Any]], Any]:
    """Compile the graph with Inductor, or run it op by op where Inductor cannot compile.

    functorch's function of this name uses TorchScript's fusing compilers, NNC and nvFuser, which PyTorch has removed or
    never shipped. So Inductor replaces them, and a FallbackWarning says so once. `fuse` calls Inductor directly, and
    lets it optimise the joint graph before it is cut.

    Args:
        fx_g: one graph of ATen ops.
        inps: its example inputs, fake or real.

    Returns:
        A function of one list, the graph's inputs, which it empties.
    """
    devices = sorted({value.device.type for value in inps if isinstance(value, torch.Tensor)}) or ["cpu"]
    reason = next((why for why in map(why_inductor_is_unavailable, devices) if why is not None), None)
    replacement = "Inductor compiles the graph" if reason is None else f"the graph runs op by op ({reason})"
    say_once(
        f"ts_compile: TorchScript's fusers, NNC and nvFuser, are gone from PyTorch; {replacement}. "
        "Write fuse(fn, backend='inductor') instead of aot_function(fn, ts_compile, ...)"
    )
    return compile_one_graph(fx_g, inps) if reason is None else boxed(fx_g)
