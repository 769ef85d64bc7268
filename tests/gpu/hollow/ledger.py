"""Print what each form of a model does on a GPU, counted on the driver of driver.c: kernels, bytes, the host's time.

Products of matrices and attention are the same in every form, so their bytes are left out. Of the other kernels

    this library's    move the tensors that they get, each once
    Inductor's        move what Inductor itself counts: each buffer once, and of a sliced buffer the slices
    torch's own       move their inputs and results, each once, where they launched a kernel, a copy or a fill
"""

import argparse
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fuselayers
from fuselayers import ops
from fuselayers.components.model.plain_torch import plain_twin
from fuselayers.ops.implementations import launch
from fuselayers.ops.linear_cross_entropy import call as loss
from fuselayers.ops.linear_cross_entropy import log_prob
from fuselayers.partition import fuse
from plots.gpu_step import FORMS, SIZES, made
from tests.gpu.hollow.driver import LOADED, counted, started
from tests.gpu.hollow.host_times import seconds, show

PRODUCTS: Final = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward", "_addmm_activation"}
)
# They read one element, or one row, for each of the result.
GATHERS: Final = frozenset({"embedding", "gather", "index_select", "nll_loss_forward"})
# They overwrite their first argument without reading it.
FILLS: Final = frozenset({"copy_", "fill_", "zero_", "random_"})


OPAQUE: Final = {
    "linear_cross_entropy_losses": loss._run_losses,
    "linear_cross_entropy_with_gradients": loss._run_with_gradients,
    "linear_cross_entropy_with_dlogits": loss._run_with_dlogits,
    "linear_cross_entropy_backward": loss._run_backward,
    "linear_log_prob": log_prob._run_numbers,
    "linear_log_prob_backward": log_prob._run_backward,
}


@dataclass
class Ledger:
    """What a forward and backward does.

    Attributes:
        launches: kernels.
        moved: bytes of all kernels but products and attention.
        kinds: the kernels that moved them, by who wrote them.
        saved: bytes of memory that forward leaves allocated.
        milliseconds: of the host.
        rows: for each kind and name the calls and bytes.
    """

    launches: int = 0
    moved: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    saved: int = 0
    milliseconds: float = 0.0
    rows: dict[tuple[str, str], list[int]] = field(default_factory=dict)

    def add(self, kind: str, name: str, moved: int) -> None:
        """Count a kernel."""
        row = self.rows.setdefault((kind, name), [0, 0])
        row[0] += 1
        row[1] += moved
        self.kinds[kind] += 1
        self.moved += moved


def num_bytes(tensors: Iterable[Any]) -> int:
    """The bytes of tensors on the GPU, each memory once."""
    sizes = {
        (tensor.data_ptr(), tensor.numel()): min(
            tensor.numel() * tensor.itemsize,
            tensor.untyped_storage().nbytes(),  # an expanded tensor's
        )
        for tensor in tensors
        if isinstance(tensor, Tensor) and tensor.is_cuda
    }
    return sum(sizes.values())


class _TorchsKernels(TorchDispatchMode):
    """Counts the kernels of torch's ops."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True  # else Dynamo would not run compiled code

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self.ledger = ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in OPAQUE:  # it calls torch's ops
            with self:
                return OPAQUE[name](*args, **kwargs)
        before = started()
        results = func(*args, **kwargs)
        if started() == before or name in PRODUCTS or "attention" in name or func.namespace == "fuselayers":
            return results
        outs = {id(value) for key, value in kwargs.items() if func._schema.name and key in _outs(func)}
        read = [value for value in tree_leaves((args, kwargs)) if id(value) not in outs]
        written = tree_leaves(results)
        if name in FILLS:
            read = [value for value in read if value is not args[0]]
        moved = num_bytes(written)
        if name in GATHERS:
            moved += min(num_bytes(read), moved)
        elif name == "nll_loss_backward":
            pass  # fills the gradient, and writes an element of each row
        else:
            moved += num_bytes(read)
        self.ledger.add("torch", name, moved)
        return results


def _outs(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments if argument.is_out}


@contextlib.contextmanager
def counting(ledger: Ledger) -> Iterator[None]:
    """Count every kernel that runs inside."""
    run = CachingAutotuner.run

    def run_generated(self: Any, *args: Any, **options: Any) -> Any:
        gigabytes = self.inductor_meta.get("kernel_num_gb")
        if gigabytes is None:  # one of this library's, launched by Inductor's code
            ledger.add("ours", self.fn.__name__, num_bytes(args))
        else:
            ledger.add("generated", self.inductor_meta["kernel_name"], round(gigabytes * 1e9))
        return run(self, *args, **options)

    def record(function: Any, grid: Any, arguments: Any, constants: Any, num_warps: int, persistent: Any) -> int:
        launch.recorder = None
        try:
            programs = launch.launch(
                function, grid, arguments, constants, num_warps=num_warps, persistent_warps=persistent
            )
        finally:
            launch.recorder = record
        module = function.fn.__module__.rpartition(".ops.")[2]
        # Of the partial sums only a row of each program is written.
        moved = 0 if module.startswith("attention") else num_bytes(arguments)
        ledger.add("ours", f"{module}.{function.fn.__name__}", moved)
        return programs

    launch.recorder = record
    try:
        with mock.patch.object(CachingAutotuner, "run", run_generated), _TorchsKernels(ledger):
            yield
    finally:
        launch.recorder = None


@inductor_config.patch(benchmark_combo_kernel=True)  # Inductor then notes what each kernel moves
def ledger_of(loss_of: Callable[[], Tensor], wanted: list[Tensor]) -> Ledger:
    """The ledger of a steady forward and backward. What is compiled must be compiled by `loss_of`."""

    dy = torch.zeros_like(loss_of())

    def step() -> None:
        torch.autograd.grad(loss_of(), wanted, dy, allow_unused=True)

    for _ in range(3):
        step()
    ledger = Ledger(launches=sum(counted(step).launches))
    before = torch.cuda.memory_allocated()
    y = loss_of()
    ledger.saved = torch.cuda.memory_allocated() - before
    del y
    with counting(ledger):
        step()
    ledger.milliseconds = seconds(step, calls=2, rounds=5) * 1e3
    torch.compiler.reset()
    return ledger


B, T, N, HEADS, P = 8, 1024, 768, 12, 0.1


class Weights(NamedTuple):
    """The weights of a pre-norm block of a GPT."""

    norm1: Tensor
    bias1: Tensor
    qkv: Tensor
    out: Tensor
    out_bias: Tensor
    norm2: Tensor
    bias2: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


def attention(y: Tensor, w: Weights) -> Tensor:
    q, k, v = F.linear(y, w.qkv).view(B, T, 3, HEADS, N // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).reshape(B, T, N), w.out)


def plain_block(x: Tensor, *weights: Tensor) -> Tensor:
    """The block in plain PyTorch, with the biases of its linear layers apart."""
    w = Weights(*weights)
    x = x + F.dropout(attention(F.layer_norm(x, (N,), w.norm1, w.bias1), w) + w.out_bias, P)
    y = F.linear(F.layer_norm(x, (N,), w.norm2, w.bias2), w.up) + w.up_bias
    return x + F.dropout(F.linear(F.dropout(F.gelu(y), P), w.down) + w.down_bias, P)


def block_of_ops(x: Tensor, *weights: Tensor) -> Tensor:
    """The same block, an op for each step."""
    w = Weights(*weights)
    y = attention(ops.layer_norm(x, weight=w.norm1, bias=w.bias1), w)
    x = ops.bias_dropout_residual(y, x, bias=w.out_bias, p=P)
    y = F.linear(ops.layer_norm(x, weight=w.norm2, bias=w.bias2), w.up)
    y = ops.bias_activation_dropout(y, w.up_bias, activation="gelu", p=P)
    return ops.bias_dropout_residual(F.linear(y, w.down), x, bias=w.down_bias, p=P)


def prenorm_block_of_ops(x: Tensor, *weights: Tensor) -> Tensor:
    """The same block, with one op for the residual sum and the norm after it."""
    w = Weights(*weights)
    y, x = ops.bias_dropout_residual_layer_norm(
        attention(ops.layer_norm(x, weight=w.norm1, bias=w.bias1), w),
        x,
        weight=w.norm2,
        norm_bias=w.bias2,
        bias=w.out_bias,
        p=P,
        style="prenorm",
    )
    y = ops.bias_activation_dropout(F.linear(y, w.up), w.up_bias, activation="gelu", p=P)
    return ops.bias_dropout_residual(F.linear(y, w.down), x, bias=w.down_bias, p=P)


BLOCKS: Final[dict[str, Callable[[], Callable[..., Tensor]]]] = {
    "plain PyTorch": lambda: plain_block,
    "plain, torch.compile": lambda: torch.compile(plain_block, fullgraph=True),
    "plain, fuse": lambda: fuse(plain_block, fallback=(), fullgraph=True),
    "ops, eager": lambda: block_of_ops,
    "ops, prenorm, eager": lambda: prenorm_block_of_ops,
    "ops, fuse": lambda: fuse(block_of_ops, fallback=(), fullgraph=True),
    "ops, prenorm, fuse": lambda: fuse(prenorm_block_of_ops, fallback=(), fullgraph=True),
    "ops, inductor": lambda: fuse(block_of_ops, backend="inductor", fallback=(), fullgraph=True),
    "ops, fuse, budget:0.65": lambda: fuse(block_of_ops, partition="budget:0.65", fallback=(), fullgraph=True),
}


def block_ledger(name: str) -> Ledger:
    """The ledger of a block, 8 x 1024 tokens, 768 wide, bfloat16, dropout 0.1."""
    shapes: list[tuple[int, ...]] = [
        *((B, T, N), (N,), (N,), (3 * N, N), (N, N), (N,), (N,), (N,), (4 * N, N), (4 * N,), (N, 4 * N), (N,))
    ]
    tensors = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True) for shape in shapes]
    block = BLOCKS[name]()
    return ledger_of(lambda: block(*tensors), tensors)


def model_ledger(name: str, size: str) -> Ledger:
    """The ledger of a GPT of plots.gpu_step."""
    options, shape = SIZES[size]
    model, loss_of = made(name, options)
    tokens_BT = torch.zeros(shape, dtype=torch.int64, device="cuda")
    return ledger_of(lambda: loss_of(tokens_BT, targets_BT=tokens_BT), list(model.parameters()))


def plain_log_prob(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    log_p = F.log_softmax(F.linear(x, weight).float(), -1)
    return log_p.gather(-1, target[:, None])[:, 0] - (log_p.exp() * log_p).sum(-1)


def plain_loss(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), target)


LOSSES: Final[dict[str, Callable[[], Callable[..., Tensor]]]] = {
    "loss, plain PyTorch": lambda: plain_loss,
    "loss, torch.compile": lambda: torch.compile(plain_loss),
    "loss, linear_cross_entropy": lambda: ops.linear_cross_entropy,
    "log_prob, plain PyTorch": lambda: plain_log_prob,
    "log_prob, torch.compile": lambda: torch.compile(plain_log_prob),
    "log_prob, linear_log_prob": lambda: lambda *call: torch.add(*ops.linear_log_prob(*call)[:2]),
}


def loss_ledger(name: str, classes: int = 16384) -> Ledger:
    """The ledger of a loss of 8192 tokens, 4096 wide, bfloat16."""
    x, weight = (
        torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True) for rows in (8192, classes)
    )
    target = torch.zeros(8192, dtype=torch.int64, device="cuda")
    loss = LOSSES[name]()
    return ledger_of(lambda: loss(x, weight, target), [x, weight])


_WIDE: Final = ("model.hidden_dim=768", "attention.num_heads=12", "model.num_layers=4")


def _twin(name: str, *options: str) -> nn.Module:
    """A model in plain PyTorch."""
    return plain_twin(fuselayers.build(name, [*_WIDE, "fusion=off", *options]))


def _of_transformers(model: str, **options: Any) -> nn.Module:
    """A model of transformers."""
    import transformers

    config = transformers.AutoConfig.for_model(model, vocab_size=1024, **options)
    kind = transformers.AutoModelForMaskedLM if model == "bert" else transformers.AutoModelForCausalLM
    built: nn.Module = kind.from_config(config)
    return built


_SIZES: Final = {"hidden_size": 768, "num_hidden_layers": 4, "num_attention_heads": 12}
MODELS: Final[dict[str, Callable[[], nn.Module]]] = {
    "plain GPT": lambda: _twin("gpt_nano", "model.context_length=1024"),
    "plain BERT": lambda: _twin("bert_tiny", "model.context_length=1024"),
    "plain Llama": lambda: _twin("llama_tiny", "model.context_length=1024"),
    "GPT-2 of transformers": lambda: _of_transformers("gpt2", n_layer=4),
    "BERT of transformers": lambda: _of_transformers("bert", max_position_embeddings=1024, **_SIZES),
    "Llama of transformers": lambda: _of_transformers("llama", intermediate_size=2048, num_key_value_heads=4, **_SIZES),
}


def plain_model_ledger(name: str, *, fused: bool) -> Ledger:
    """The ledger of a model that knows nothing of this library, 8 x 1024 tokens, 768 wide, bfloat16."""
    torch.manual_seed(0)
    model = MODELS[name]().to("cuda", torch.bfloat16).train()
    call: Any = fuse(model, fallback=()) if fused else torch.compile(model)
    tokens_BT = torch.zeros(B, T, dtype=torch.int64, device="cuda")
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if name.startswith("plain"):
        return ledger_of(lambda: call(tokens_BT, tokens_BT), weights)
    options = {} if name.startswith("BERT") else {"use_cache": False}
    return ledger_of(lambda: call(input_ids=tokens_BT, labels=tokens_BT, **options).loss, weights)


def print_table(title: str, names: Iterable[str], ledger_named: Callable[[str], Ledger], *, kernels: bool) -> None:
    rows, first = [], None
    for name in names:
        ledger = ledger_named(name)
        first = first or ledger
        rows.append(
            [
                *(name, str(ledger.launches), f"{ledger.moved / 1e6:.0f}"),
                *(str(ledger.kinds[kind]) for kind in ("ours", "generated", "torch")),
                *(f"{ledger.saved / 1e6:.0f}", f"{ledger.saved / first.saved:.2f}", f"{ledger.milliseconds:.2f}"),
            ]
        )
        if kernels:
            print(f"\n{name}")
            for (kind, kernel), (calls, moved) in sorted(ledger.rows.items(), key=lambda row: -row[1][1]):
                print(f"  {moved / 1e6:8.1f} MB {calls:4d} {kind:10s} {kernel}")
    head = ["form", "launches", "MB moved", "by ours", "by generated", "by torch's", "MB saved", "share", "host ms"]
    show(title, head, rows)


if __name__ == "__main__":
    if not LOADED:
        raise SystemExit("this needs the driver of tests/gpu/hollow: run it by `make gpu-hollow`")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="words that a row's name has to have")
    parser.add_argument("--kernels", action="store_true", help="every kernel's bytes")
    parsed = parser.parse_args()
    chosen: Any = lambda names: [name for name in names if all(word in name for word in parsed.only)]  # noqa: E731
    size = "4 layers, 768 wide, 8 x 1024 tokens"
    print_table(
        f"GPT, {size}, bfloat16, dropout {P}",
        chosen(FORMS),
        lambda name: model_ledger(name, size),
        kernels=parsed.kernels,
    )
    print_table(
        f"A GPT's block, {B} x {T} tokens, {N} wide, bfloat16, dropout {P}",
        chosen(BLOCKS),
        block_ledger,
        kernels=parsed.kernels,
    )
    for name in chosen(MODELS):
        print_table(
            f"{name}, 4 layers, {N} wide, {B} x {T} tokens, bfloat16",
            ("torch.compile", "fuse"),
            lambda form, name=name: plain_model_ledger(name, fused=form == "fuse"),  # type: ignore[misc]
            kernels=parsed.kernels,
        )
    for classes in (16384, 128256):
        print_table(
            f"Loss of 8192 tokens, 4096 wide, {classes} classes, bfloat16",
            chosen(LOSSES),
            lambda name, classes=classes: loss_ledger(name, classes),  # type: ignore[misc]
            kernels=parsed.kernels,
        )
