"""The check that a function can be captured in a CUDA graph, for the tests that run on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselayers.testing import NotApplicable, results
from fuselayers.testing.comparison import Op, backward, cast, compare, forward, incoming_for


def check_cuda_graph(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    """Forward and backward can be captured in a CUDA graph, and a replay uses the current values of the inputs."""
    if inputs[0].device.type != "cuda":
        raise NotApplicable("needs inputs on a CUDA GPU")
    with torch.cuda.device(inputs[0].device):
        _check_cuda_graph(op, reference, inputs, **options)


def _check_cuda_graph(op: Op, reference: Op, inputs: Sequence[Tensor], **options: Any) -> None:
    static = [value.clone() for value in inputs]
    incoming = incoming_for(forward(op, static, **options)[1])

    def step() -> dict[str, Tensor]:
        leaves, outputs = forward(op, static, **options)
        return backward(leaves, outputs, incoming)

    stream = torch.cuda.current_stream()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    stream.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = step()
    except BaseException:
        # After a failed capture torch keeps its stream current, and in some versions its generator waits for the end
        # of a capture. A second capture ends that.
        torch.cuda.set_stream(stream)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            static[0].clone()
        raise
    other = [value.flip(tuple(range(value.dim()))) if value.is_floating_point() else value for value in inputs]
    with torch.no_grad():
        for place, value in zip(static, other, strict=True):
            place.copy_(value)
    graph.replay()
    exact = results(reference, cast(other, torch.float64), **options)
    compare(captured, results(reference, other, **options), exact, inputs)
