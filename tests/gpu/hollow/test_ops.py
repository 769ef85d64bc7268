"""Devices, dtypes, launches and waits of every op."""

import re
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from fuselayers import ops
from fuselayers.ops.attention import kernels
from tests.gpu.hollow.driver import counted
from tests.ops.cases import CASES, Case
from tests.ops.contract import tensors

SHAPE = (64, 128)
all_nodes = pytest.mark.parametrize("case", list(CASES.values()), ids=CASES)


def of_device(case: Case, device: str, dtype: torch.dtype) -> tuple[list[Tensor], dict[str, object]]:
    """A case's tensors and options on a device."""
    inputs = [tensor.to(device).requires_grad_() for tensor in tensors(*case.shapes(SHAPE), dtype=dtype)]
    options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in case.options.items()}
    return inputs, options


def results(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """The outputs of an op, and the gradients of its inputs."""
    inputs, options = of_device(case, device, dtype)
    y = case.op(*inputs, **options)
    ys = [y] if isinstance(y, Tensor) else list(y)
    return [*ys, *torch.autograd.grad(ys, inputs, [torch.ones_like(y) for y in ys])]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_nodes
def test_results_are_those_of_a_cpu_in_all_but_values(case: Case, dtype: torch.dtype) -> None:
    of_gpu, of_cpu = results(case, "cuda:0", dtype), results(case, "cpu", dtype)
    assert [(result.dtype, result.shape) for result in of_gpu] == [(result.dtype, result.shape) for result in of_cpu]
    assert {result.device for result in of_gpu} == {torch.device("cuda:0")}


@pytest.mark.parametrize("name", CASES)
def test_forward_is_one_launch(name: str) -> None:
    inputs, options = of_device(CASES[name], "cuda:0", torch.bfloat16)
    CASES[name].op(*inputs, **options)
    count = counted(lambda: CASES[name].op(*inputs, **options))
    assert count.launches == [1, 0]
    assert count.waits == [0, 0], count.lines


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("channels", "fits"), [(256, True), (512, False)])
def test_heads_too_wide_for_the_kernels_take_the_formula(
    channels: int, fits: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = []
    monkeypatch.setattr(kernels, "launch", lambda function, *rest, **options: launched.append(function))
    q, k, v = torch.zeros(3, 1, 1, 32, channels, device="cuda", requires_grad=True)
    attention = torch.compile(ops.attention) if compiled else ops.attention
    attention(q, k, v, p=0.1).sum().backward()
    assert len(launched) == (3 if fits else 0)


def test_compiled_code_launches_the_kernel_of_masks_itself() -> None:
    """Inductor's code calls this library for the first seed alone. Each mask has the numbers of `keep_factors`."""
    x = torch.zeros(*SHAPE, device="cuda", requires_grad=True)
    twice = torch.compile(lambda x: ops.dropout(ops.dropout(x, 0.1), 0.1))
    _, codes = run_and_get_code(lambda: twice(x).sum().backward())
    code = "\n".join(line for line in "\n".join(codes).splitlines() if not line.lstrip().startswith("#"))
    masks = re.findall(r"keep_kernel_\d\.run\((.*)\)", code)
    assert len(masks) == 4, "two in forward, two in backward"
    rows, groups, threshold = 64, 128 // 8, round(0.1 * 65536)
    for arguments in masks:
        assert f", 0, {rows}, {groups}, {threshold}, " in arguments
    calls = re.findall(r"= torch\.ops\.(fuselayers\.\w+|aten\.randint\w*)", code.partition("def call(")[2])
    assert sorted(set(calls)) == ["aten.randint", "aten.randint_like"]


def test_torch_takes_a_small_norm_that_it_has_one_kernel_for() -> None:
    """The kernels take a large one, one with a dropout or a sum, and one that torch would copy to another dtype."""

    def taken_by(rows: int, weight_dtype: torch.dtype = torch.bfloat16) -> str:
        x = torch.zeros(rows, 1024, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        y = ops.layer_norm(x, weight=torch.ones(1024, dtype=weight_dtype, device="cuda"))
        return type(y.grad_fn).__name__

    assert taken_by(2047) == "NativeLayerNormBackward0"
    assert taken_by(2048) == "_NormaliseBackward"
    assert taken_by(2, torch.float32) == "_NormaliseBackward"
    with torch.autocast("cuda", torch.bfloat16):
        assert taken_by(2) == "_NormaliseBackward"
    x = torch.zeros(2, 8, device="cuda", requires_grad=True)
    y, _ = ops.residual_layer_norm(x, x, weight=torch.ones(8, device="cuda"))
    assert type(y.grad_fn).__name__ == "_NormaliseBackward"


@all_nodes
def test_an_op_runs_on_the_device_of_its_tensors(case: Case) -> None:
    """The current device is the other device, in forward and in backward."""
    inputs, options = of_device(case, "cuda:1", torch.float32)

    def step() -> None:
        y = case.op(*inputs, **options)
        ys = [y] if isinstance(y, Tensor) else list(y)
        for gradient in torch.autograd.grad(ys, inputs, [torch.ones_like(y) for y in ys]):
            assert gradient.device == torch.device("cuda:1")

    assert torch.cuda.current_device() == 0
    step()
    count = counted(step)
    assert count.launches[0] == 0 < count.launches[1]
    assert count.waits == [0, 0], count.lines
    assert torch.cuda.current_device() == 0


ON_A_CPU = """
import warnings
import torch
from fuselayers import ops

def step():
    x, bias = torch.zeros(512, 256, requires_grad=True), torch.zeros(256, requires_grad=True)  # 131,072 elements
    y = ops.bias_activation_dropout(x, bias, activation="gelu", p=0.1)
    y = ops.bias_dropout_residual_layer_norm(y, x, weight=bias, p=0.1)
    y = ops.gated_activation(y, x)
    y.sum().backward()
    assert not torch.cuda.is_initialized()

class Steps(torch.utils.data.Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        step()
        return index

assert torch.cuda.device_count() == 2
warnings.simplefilter("error")
# The worker first: torch forbids a backward in a child of a process that has run one.
print(list(torch.utils.data.DataLoader(Steps(), num_workers=1, multiprocessing_context="fork")))
step()
"""


def test_ops_on_a_cpu_leave_the_gpu_alone() -> None:
    """In forked workers of a data loader too, which must not touch CUDA."""
    command = [sys.executable, "-c", ON_A_CPU]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "[tensor([0])]\n", done.stdout + done.stderr
