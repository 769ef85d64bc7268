"""Print the time that the host takes for each op and for a step of a GPT, on the driver of driver.c.

Kernels do nothing there. A GPU waits for the host if its kernels take less time than this. The least of several rounds
counts.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuselayers
from fuselayers import ops
from fuselayers.components.model.plain_torch import plain_twin
from tests.gpu.hollow.driver import LOADED, counted

DTYPE = torch.bfloat16
ROWS, WIDTH, P = 1024, 128, 0.1


def seconds(call: Callable[[], object], *, calls: int, rounds: int = 7) -> float:
    """The time of a call: the least mean of all rounds."""
    means = []
    for _ in range(rounds):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        means.append((time.perf_counter() - started) / calls)
    return min(means)


def numbers(call: Callable[[], Tensor | tuple[Tensor, ...]], wanted: Sequence[Tensor], dy: Tensor) -> list[str]:
    """Microseconds and launches, forward and forward + backward."""

    def both() -> None:
        y = call()
        y = y if isinstance(y, Tensor) else y[0]
        torch.autograd.grad(y, wanted, dy.expand_as(y))

    cells = []
    for measured in (call, both):
        for _ in range(3):
            measured()
        cells += [f"{seconds(measured, calls=100) * 1e6:.0f}", str(sum(counted(measured).launches))]
    return cells


def op_rows() -> list[list[str]]:
    """A row for each op, with its numbers beside those of the same formula in PyTorch."""
    x, residual = (torch.zeros(ROWS, WIDTH, dtype=DTYPE, device="cuda", requires_grad=True) for _ in range(2))
    bias, weight, norm_bias = (torch.zeros(WIDTH, dtype=DTYPE, device="cuda", requires_grad=True) for _ in range(3))
    dy = torch.zeros(ROWS, WIDTH, dtype=DTYPE, device="cuda")
    width = (WIDTH,)
    norm = {"weight": weight, "bias": norm_bias}
    named: dict[str, tuple[Callable[[], object], Callable[[], object], list[Tensor]]] = {
        "dropout": (lambda: ops.dropout(x, P), lambda: F.dropout(x, P), [x]),
        "bias_activation_dropout": (
            lambda: ops.bias_activation_dropout(x, bias, activation="gelu", p=P),
            lambda: F.dropout(F.gelu(x + bias), P),
            [x, bias],
        ),
        "..., p = 0": (
            lambda: ops.bias_activation_dropout(x, bias, activation="gelu"),
            lambda: F.gelu(x + bias),
            [x, bias],
        ),
        "bias_dropout_residual": (
            lambda: ops.bias_dropout_residual(x, residual, bias=bias, p=P),
            lambda: F.dropout(x + bias, P) + residual,
            [x, residual, bias],
        ),
        "bias_dropout_residual_layer_norm": (
            lambda: ops.bias_dropout_residual_layer_norm(
                x, residual, weight=weight, norm_bias=norm_bias, bias=bias, p=P
            ),
            lambda: F.layer_norm(F.dropout(x + bias, P) + residual, width, weight, norm_bias),
            [x, residual, weight, norm_bias, bias],
        ),
        "layer_norm": (
            lambda: ops.layer_norm(x, **norm),
            lambda: F.layer_norm(x, width, weight, norm_bias),
            [x, weight, norm_bias],
        ),
        "rms_norm": (
            lambda: ops.rms_norm(x, weight=weight),
            lambda: F.rms_norm(x, width, weight),
            [x, weight],
        ),
        "residual_layer_norm": (
            lambda: ops.residual_layer_norm(x, residual, **norm),
            lambda: F.layer_norm(x + residual, width, weight, norm_bias),
            [x, residual, weight, norm_bias],
        ),
        "gated_activation": (
            lambda: ops.gated_activation(x, residual),
            lambda: F.silu(x) * residual,
            [x, residual],
        ),
    }
    return [
        [name, *(cell for call in (ours, plain) for cell in numbers(call, wanted, dy))]  # type: ignore[arg-type]
        for name, (ours, plain, wanted) in named.items()
    ]


def step_rows() -> list[list[str]]:
    """A row for each form of a GPT of six layers: ms and launches, forward and forward + backward."""

    def built(fusion: str) -> nn.Module:
        return fuselayers.build("gpt_nano", ["model.num_layers=6", f"fusion={fusion}"])

    forms: dict[str, Callable[[], nn.Module]] = {
        "plain PyTorch": lambda: plain_twin(built("off")),
        "fusion=off": lambda: built("off"),
        "fusion=inductor": lambda: built("inductor"),
        "torch.compile of fusion=off": lambda: torch.compile(built("off")),  # type: ignore[dict-item,return-value]
        "fusion=off, graphed": lambda: built("off"),
        "fusion=inductor, graphed": lambda: built("inductor"),
    }
    tokens_BT = torch.zeros(8, 128, dtype=torch.int64, device="cuda")
    rows = []
    for name, make in forms.items():
        model = make().to("cuda", DTYPE).train()
        weights = list(model.parameters())
        if name.endswith("graphed"):
            model = torch.cuda.make_graphed_callables(model, (tokens_BT, tokens_BT))  # type: ignore[no-untyped-call]

        def forward(model: nn.Module = model) -> Tensor:
            return model(tokens_BT, tokens_BT)  # type: ignore[no-any-return]

        def step(forward: Callable[[], Tensor] = forward, weights: list[nn.Parameter] = weights) -> None:
            torch.autograd.grad(forward(), weights)

        cells = []
        for measured in (forward, step):
            for _ in range(3):
                measured()
            count = counted(measured)
            cells += [f"{seconds(measured, calls=10) * 1e3:.2f}", str(sum(count.launches)), str(sum(count.waits))]
        rows.append([name, *cells])
        torch.compiler.reset()
    return rows


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    print(f"\n{title}")
    for row in (head, *rows):
        print(row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)))


if __name__ == "__main__":
    if not LOADED:
        raise SystemExit("this needs the driver of tests/gpu/hollow: run it by `make gpu-hollow`")
    show(
        f"Host time of an op on {ROWS} x {WIDTH}, {DTYPE}: us and launches; 'both' is forward + backward",
        ["op", "forward", "launches", "both", "launches", "plain forward", "launches", "plain both", "launches"],
        op_rows(),
    )
    show(
        f"Host time of a GPT of 6 layers on 8 x 128 tokens, {DTYPE}: ms, launches, waits; 'both' is forward + backward",
        ["model", "forward", "launches", "waits", "both", "launches", "waits"],
        step_rows(),
    )
