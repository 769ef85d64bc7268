"""Inductor's code for a GPU, run without a GPU: Triton's interpreter runs its kernels on CPU tensors.

Functions are traced on meta tensors, since autograd refuses fake CUDA tensors in torch's CPU build. Inductor then gets
the graphs with fake CUDA tensors and the properties of an H200. The rest is Inductor's own work, up to the kernels and
the Python that launches them. Needs TRITON_INTERPRET=1.
"""

import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
import torch
import torch.fx as fx
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fuselayers.ops import draw, philox
from fuselayers.ops.implementations import dispatch
from fuselayers.ops.implementations.interpreter import patch_interpreter
from fuselayers.ops.implementations.triton_language import tl

_H200: Final = types.SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 << 30,
    L2_cache_size=50 << 20,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    warp_size=32,
    gcnArchName="",
)


class Gpu:
    """A simulated GPU.

    Attributes:
        kernels: the source of each kernel that Inductor generated for it.
        ops: the names of this library's ops in each graph, forward and then backward.
    """

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.ops: list[set[str]] = []
        self._real: dict[int, Tensor] = {}

    def run(self, compiled: Callable[..., Any], *tensors: Tensor) -> Any:
        """Call a function of `fuse` or `torch.compile` on Inductor with CPU tensors. Its backward works too."""
        on_meta = [tensor.detach().to("meta").requires_grad_(tensor.requires_grad) for tensor in tensors]
        self._real = dict(zip(map(id, on_meta), tensors, strict=True))
        return compiled(*on_meta)

    def _compile(
        self, compile_fx: Callable[..., Any], graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx_inner  # the patched one

        compiled = compile_fx(graph_module, inputs, **{"inner_compile": compile_fx_inner, **options})
        return lambda *now: compiled(*(self._real.get(id(value), value) for value in now))

    def _compile_on_cuda(
        self, inner: Callable[..., Any], graph_module: fx.GraphModule, inputs: Sequence[Any], **options: Any
    ) -> Any:
        called = (node.target for node in graph_module.graph.nodes if isinstance(node.target, torch._ops.OpOverload))
        names = (target.name() for target in called)
        self.ops.append({name.partition("::")[2] for name in names if name.startswith("fuselayers::")})
        return inner(graph_module, _move(graph_module.graph, "cuda:0"), **options)


@contextlib.contextmanager
def fake_gpu() -> Iterator[Gpu]:
    """Let Inductor compile for a GPU, and run the generated code, forward and backward."""
    from torch._dynamo import device_interface
    from torch._inductor import compile_fx, config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.runtime import hints, triton_helpers
    from torch.utils import _triton

    patch_interpreter()
    # Dynamo compiles a function for at most eight kinds of call in a process, and all tests share the ops' code.
    torch.compiler.reset()
    gpu = Gpu()
    load = AsyncCompile.triton

    def noted(self: Any, name: str, source: str, *rest: Any, **options: Any) -> Any:
        gpu.kernels.append(source)
        return load(self, name, source, *rest, **options)

    guards, cuda, interface = torch._C._dynamo.guards, torch.cuda, device_interface.CudaInterface
    cached = (hints.DeviceProperties.create, _triton.has_triton)
    settings = {"force_disable_caches": True, "joint_custom_pre_pass": _move_to_cpu}
    with pytest.MonkeyPatch.context() as patch, config.patch(settings), _bool_masks():
        patch.setattr(philox, "_dtype_on_cpu", torch.bool)
        patch.setattr(dispatch, "is_on_gpu", lambda tensor: tensor.is_meta)
        drawn = draw._drawn
        patch.setattr(draw, "_drawn", lambda device: drawn(torch.device("cpu")))
        patch.setattr(compile_fx, "compile_fx", functools.partial(gpu._compile, compile_fx.compile_fx))
        inner = functools.partial(gpu._compile_on_cuda, compile_fx.compile_fx_inner)
        patch.setattr(compile_fx, "compile_fx_inner", inner)
        patch.setattr(AsyncCompile, "triton", noted)
        patch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
        patch.setattr(_triton, "triton_hash_with_backend", lambda: "")
        patch.setattr(triton_helpers, "set_driver_to_gpu", lambda: None)
        patch.setattr(interface, "is_available", staticmethod(lambda: True))
        patch.setattr(cuda, "_DeviceGuard", lambda index: contextlib.nullcontext())
        patch.setattr(cuda, "set_device", lambda device: None)
        patch.setattr(cuda, "get_device_capability", lambda *args: (_H200.major, _H200.minor))
        for owner in (cuda, interface, interface.Worker):
            patch.setattr(owner, "get_device_properties", staticmethod(lambda *args: _H200))
            patch.setattr(owner, "current_device", staticmethod(lambda: 0))
        for owner in (cuda, interface):
            patch.setattr(owner, "device_count", staticmethod(lambda: 1))
        for name in ("erf", "exp", "floor", "rsqrt", "sqrt"):  # the interpreter lacks libdevice
            patch.setattr(triton_helpers.libdevice, name, lambda x, name=name: getattr(tl, name)(x))
        for function in cached:
            function.cache_clear()
        try:
            yield gpu
        finally:
            for function in cached:
                function.cache_clear()


@contextlib.contextmanager
def _bool_masks() -> Iterator[None]:
    """Let the op that makes masks return bools on the CPU too, as on a GPU."""
    library = torch.library.Library("fuselayers", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the replaced implementation
        library.impl("keep_factors", lambda *call, **_: philox._keep_on_cpu(*call).bool(), "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


def _move_to_cpu(graph: fx.Graph) -> None:
    # The passes on the joint graph fold constants with real tensors.
    _move(graph, "cpu")


def _move(graph: fx.Graph, device_name: str) -> list[Any]:
    """Move a graph's fake tensors to a device, and return its inputs."""
    device = torch.device(device_name)
    for node in graph.nodes:
        if "device" in node.kwargs:
            # The draw of a seed takes an empty permutation, which really is made.
            made = node.target is torch.ops.aten.randperm.default
            node.kwargs = {**node.kwargs, "device": torch.device("cpu") if made else device}
    inputs = [node.meta["val"] for node in graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    with mode:
        for index, value in enumerate(inputs):
            if isinstance(value, FakeTensor):
                inputs[index] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    FakeTensorProp(graph.owning_module, mode).propagate_dont_convert_inputs(*inputs)
    return inputs
