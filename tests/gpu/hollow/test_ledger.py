"""The ledger's bytes, where they are known."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers import ops
from fuselayers.partition import fuse
from tests.gpu.hollow.ledger import Ledger, block_ledger, ledger_of, loss_ledger, plain_model_ledger

ROWS, WIDTH = 256, 512
UNIT = ROWS * WIDTH * 2  # bytes of a tensor


def tensor(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device="cuda", requires_grad=True)


def units(ledger: Ledger) -> float:
    return round(ledger.moved / UNIT, 1)


def test_a_kernel_of_torch_moves_its_inputs_and_its_results() -> None:
    """Forward reads x and writes y; backward reads dy and y and writes dx."""
    x = tensor(ROWS, WIDTH)
    ledger = ledger_of(lambda: x.sigmoid(), [x])
    assert (units(ledger), ledger.launches, ledger.saved) == (5, 2, UNIT)


def test_an_expanded_tensor_moves_once_and_a_gather_only_its_rows() -> None:
    x, table = tensor(1, WIDTH), tensor(64 * ROWS, WIDTH)
    assert units(ledger_of(lambda: x.expand(ROWS, WIDTH) + 1, [x])) == 2  # y, and its sum over the rows
    picked = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
    assert ledger_of(lambda: F.embedding(picked, table), [table]).rows["torch", "embedding"] == [1, 2 * UNIT]


def test_products_and_attention_are_left_out() -> None:
    x, weight = tensor(4, 64, 64), tensor(64, 64)
    ledger = ledger_of(lambda: F.scaled_dot_product_attention(*[F.linear(x, weight)[None]] * 3), [weight])
    assert not {name for _, name in ledger.rows if "attention" in name or name in ("mm", "addmm")}
    assert ledger.launches > 4


def test_a_kernel_of_an_op_moves_what_its_docstring_says() -> None:
    """Forward reads x and the residual; backward reads dy and writes dx. In a compiled graph it is the same."""
    x, residual = tensor(ROWS, WIDTH), tensor(ROWS, WIDTH)

    def dropped() -> Tensor:
        return ops.bias_dropout_residual(x, residual, p=0.1)

    for form in (dropped, fuse(dropped, backend="triton", fallback=())):
        ledger = ledger_of(form, [x, residual])
        assert (units(ledger), ledger.kinds["ours"]) == (5, 2)


def test_generated_code_moves_each_buffer_once_and_of_a_sliced_one_the_slices() -> None:
    x, packed = tensor(ROWS, WIDTH), tensor(ROWS, 4 * WIDTH).detach()
    ledger = ledger_of(torch.compile(lambda: (x + 1) * packed[:, :WIDTH]), [x])
    assert (units(ledger), ledger.kinds["generated"]) == (6, 2)  # dx = dy * packed


@pytest.mark.parametrize("classes", [16384, 128256])
@pytest.mark.parametrize(("op", "kind"), [("linear_cross_entropy", "loss"), ("linear_log_prob", "log_prob")])
def test_a_loss_of_a_head_moves_no_more_than_plain_pytorch(op: str, kind: str, classes: int) -> None:
    """With few classes all logits fit: forward and backward take a kernel each, and one to reduce the losses."""
    ours, plain = (loss_ledger(f"{kind}, {form}", classes) for form in (op, "plain PyTorch"))
    assert ours.moved < plain.moved
    assert ours.saved <= plain.saved * 1.001
    if (kind, classes) == ("loss", 16384):
        assert ours.kinds == {"ours": 3}


def test_a_fused_block_moves_less_than_the_code_of_torch_compile() -> None:
    """By default the kernels of the ops are in its graphs, and neighbours among them are one kernel."""
    plain, compiled = block_ledger("plain PyTorch"), block_ledger("plain, torch.compile")
    fused, smaller = block_ledger("ops, fuse"), block_ledger("ops, fuse, budget:0.65")
    assert fused.moved < 640e6 < 0.72 * compiled.moved
    assert smaller.moved < 760e6
    assert smaller.saved < 0.54 * plain.saved < fused.saved < 0.85 * plain.saved
    assert max(fused.launches, smaller.launches) < plain.launches


def test_a_plain_block_moves_less_than_the_code_of_torch_compile() -> None:
    """Its calls become ops."""
    compiled, fused = block_ledger("plain, torch.compile"), block_ledger("plain, fuse")
    assert fused.moved < 0.7 * compiled.moved
    assert fused.launches < compiled.launches


# Without dropout Inductor's code already moves about as little: the bytes of Llama are those of its gates and norms.
@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("plain GPT", 0.83),
        ("BERT of transformers", 0.83),
        ("GPT-2 of transformers", 0.9),
        ("plain BERT", 0.94),
        ("plain Llama", 1.0),
        ("Llama of transformers", 1.03),
    ],
)
def test_plain_models_move_no_more_than_the_code_of_torch_compile(name: str, share: float) -> None:
    if name.endswith("transformers"):
        pytest.importorskip("transformers")
    compiled, fused = (plain_model_ledger(name, fused=form) for form in (False, True))
    assert fused.moved < share * compiled.moved
    assert fused.saved < 1.01 * compiled.saved
    drops_in_attention = "BERT" in name or "GPT-2" in name
    assert (("ours", "attention.kernels._forward_kernel") in fused.rows) == drops_in_attention
