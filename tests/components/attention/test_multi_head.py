import copy
import math
import pickle
import re

import pytest
import torch
from torch import Tensor

from fuselayers.components import MultiHeadAttention, RotaryPosition
from fuselayers.ops import dropout
from tests.components.attention import contract
from tests.components.compare import assert_same_step, randomise, run

HIDDEN_DIM = 12


def reference(
    layer: MultiHeadAttention, x_BTD: Tensor, *, rotate: object = None, real_BT: Tensor | None = None
) -> Tensor:
    """Attention written out, head by head and query by query, in the dtype of x."""
    batch, tokens, _ = x_BTD.shape
    heads, groups, channels = layer.num_heads, layer.num_kv_heads, layer.head_dim
    packed = x_BTD @ layer.qkv.weight.T + (layer.qkv.bias if layer.qkv.bias is not None else 0)
    q = packed[..., : heads * channels].reshape(batch, tokens, heads, channels).transpose(1, 2)
    k = (
        packed[..., heads * channels : (heads + groups) * channels]
        .reshape(batch, tokens, groups, channels)
        .transpose(1, 2)
    )
    v = packed[..., (heads + groups) * channels :].reshape(batch, tokens, groups, channels).transpose(1, 2)
    if rotate is not None:
        q, k = rotate(q, k)  # type: ignore[operator]
    rows = []
    for b in range(batch):
        for t in range(tokens):
            looked_at = [
                s for s in range(tokens) if (s <= t or not layer.causal) and (real_BT is None or bool(real_BT[b, s]))
            ]
            row = []
            for h in range(heads):
                g = h * groups // heads
                if not looked_at:
                    row.append(torch.zeros_like(q[b, h, t]))
                    continue
                scores = k[b, g, looked_at] @ q[b, h, t] / math.sqrt(channels)
                row.append(scores.softmax(0) @ v[b, g, looked_at])
            rows.append(torch.cat(row))
    mixed = torch.stack(rows).view(batch, tokens, heads * channels)
    return mixed @ layer.out.weight.T + (layer.out.bias if layer.out.bias is not None else 0)


def made(**options: object) -> MultiHeadAttention:
    return randomise(MultiHeadAttention(HIDDEN_DIM, **{"num_heads": 6, **options}))  # type: ignore[arg-type, return-value]


def padding(tokens: int) -> Tensor:
    """[3, T]: nothing padded, the end padded, the beginning padded."""
    place = torch.arange(tokens)
    return torch.stack((place >= 0, place < max(1, tokens - 2), place >= min(2, tokens - 1)))


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2}, {"num_kv_heads": 1, "bias": False}, {"num_heads": 5, "head_dim": 4}],
    ids=["all heads", "grouped", "one kv head, no bias", "own head_dim"],
)
def test_values_and_gradients(
    options: dict[str, object], rotated: bool, padded: bool, causal: bool, tokens: int
) -> None:
    layer = made(causal=causal, **options)
    rotate = RotaryPosition().rotate if rotated else None
    real_BT = padding(tokens) if padded else None
    x = torch.randn(3, tokens, HIDDEN_DIM)
    exact = copy.deepcopy(layer).double()
    torch.testing.assert_close(
        layer(x, rotate=rotate, key_padding_mask=real_BT).double(),
        reference(exact, x.double(), rotate=rotate, real_BT=real_BT),
        rtol=1e-4,
        atol=1e-4,
    )

    class Forward(torch.nn.Module):
        def __init__(self, written_out: bool) -> None:
            super().__init__()
            self.layer, self.written_out = exact, written_out

        def forward(self, x: Tensor) -> Tensor:
            if self.written_out:
                return reference(self.layer, x, rotate=rotate, real_BT=real_BT)
            return self.layer(x, rotate=rotate, key_padding_mask=real_BT)

    # In float64 both sides are exact to rounding, so that gradients are compared tightly.
    tolerance = 1e-4 if rotated else 1e-9  # the angles of rotary are float32
    assert_same_step(Forward(True), Forward(False), x.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("padded", [True, False])
def test_dropout_falls_on_the_probabilities(causal: bool, kv_heads: int, padded: bool) -> None:
    layer = made(causal=causal, num_kv_heads=kv_heads, dropout=0.4)
    x = torch.randn(3, 7, HIDDEN_DIM)
    real_BT = padding(7) if padded else None

    def written_out(x: Tensor) -> Tensor:
        q, k, v = layer.qkv(x).split([12, 2 * kv_heads, 2 * kv_heads], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in (q, k, v))
        k, v = (part.repeat_interleave(6 // kv_heads, dim=1) for part in (k, v))
        allowed = torch.ones(3, 1, 7, 7, dtype=torch.bool)
        allowed = allowed.tril() if causal else allowed
        allowed = allowed & real_BT[:, None, None] if real_BT is not None else allowed
        shares = (q @ k.mT / math.sqrt(2)).masked_fill(~allowed, -math.inf).softmax(-1)
        return layer.out((dropout(shares.nan_to_num(), 0.4) @ v).transpose(1, 2).flatten(2))

    torch.manual_seed(2)
    expected = written_out(x)
    torch.manual_seed(2)
    torch.testing.assert_close(layer(x, key_padding_mask=real_BT), expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_off_in_eval_and_on_in_training() -> None:
    dropped, plain = made(dropout=0.4), made()
    plain.load_state_dict(dropped.state_dict())
    x = torch.randn(3, 7, HIDDEN_DIM)
    assert not torch.allclose(dropped(x), plain(x), atol=1e-3)
    torch.testing.assert_close(dropped.eval()(x), plain(x))


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("causal", [True, False])
def test_a_token_with_nothing_to_look_at_gathers_zeros(causal: bool, p: float) -> None:
    layer = made(causal=causal, dropout=p)
    real_BT = torch.tensor([[False] * 4, [False, False, True, True]])
    got = run(lambda x: layer(x, key_padding_mask=real_BT), [torch.randn(2, 4, HIDDEN_DIM)])
    nothing = got["output 0"][0] if not causal else torch.cat((got["output 0"][0], got["output 0"][1, :2]))
    torch.testing.assert_close(nothing, layer.out.bias.expand_as(nothing))
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_padding_is_never_looked_at(p: float) -> None:
    layer = made(causal=False, dropout=p)
    real_BT = padding(7)
    x = torch.randn(3, 7, HIDDEN_DIM)
    other = torch.where(real_BT[..., None], x, torch.randn_like(x))
    torch.manual_seed(1)
    expected = layer(x, key_padding_mask=real_BT)
    torch.manual_seed(1)
    got = layer(other, key_padding_mask=real_BT)
    torch.testing.assert_close(got[real_BT], expected[real_BT])


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_causal_means_that_the_future_has_no_gradient(p: float) -> None:
    layer = made(dropout=p)
    x = torch.randn(1, 7, HIDDEN_DIM, requires_grad=True)
    layer(x)[:, 3].sum().backward()
    assert x.grad is not None
    assert (x.grad[0].abs().sum(-1) > 0).tolist() == [True] * 4 + [False] * 3


def test_without_tokens_there_is_nothing_to_mix() -> None:
    for kernel in ("sdpa", "plain"):
        contract.assert_no_tokens(MultiHeadAttention(contract.HIDDEN_DIM, num_heads=6, num_kv_heads=2, kernel=kernel))


def test_one_graph_for_a_compiler() -> None:
    layer = made(num_kv_heads=2, dropout=0.3)
    x, real_BT = torch.randn(3, 7, HIDDEN_DIM), padding(7)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    rotate = RotaryPosition().rotate
    torch.manual_seed(1)
    expected = layer(x, rotate=rotate, key_padding_mask=real_BT)
    torch.manual_seed(1)
    torch.testing.assert_close(compiled(x, rotate=rotate, key_padding_mask=real_BT), expected)


def test_bfloat16_autocast() -> None:
    layer = made(num_kv_heads=2, dropout=0.3)
    x = torch.randn(3, 7, HIDDEN_DIM)
    torch.manual_seed(1)
    expected = layer(x)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        got = layer(x)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=0.3)


def test_copies_and_names_of_the_parameters() -> None:
    layer = made(num_kv_heads=2)
    assert {name: tuple(value.shape) for name, value in layer.state_dict().items()} == {
        "qkv.weight": (20, 12),
        "qkv.bias": (20,),
        "out.weight": (12, 12),
        "out.bias": (12,),
    }
    x = torch.randn(2, 3, HIDDEN_DIM)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 5}, "hidden_dim must be a multiple of num_heads, got 12 and 5; or give head_dim"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
        ({"num_heads": 6, "num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"num_heads": 6, "head_dim": 0}, "head_dim must be at least 1, got 0"),
        ({"num_heads": 6, "dropout": 1.0}, "dropout must be at least 0 and below 1, got 1.0"),
        ({"num_heads": 6, "hidden_dim": 0}, "hidden_dim must be at least 1, got 0"),
    ],
)
def test_errors_of_the_constructor(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        MultiHeadAttention(**{"hidden_dim": HIDDEN_DIM, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "mask", "text"),
    [
        ((2, 12), None, "x must be [B, T, 12], got [2, 12]"),
        ((2, 3, 11), None, "x must be [B, T, 12], got [2, 3, 11]"),
        (
            (2, 3, 12),
            torch.ones(2, 4, dtype=torch.bool),
            "key_padding_mask must be torch.bool [2, 3] to fit x [2, 3, 12], True for a real token, "
            "got torch.bool [2, 4]",
        ),
        (
            (2, 3, 12),
            torch.ones(2, 3),
            "key_padding_mask must be torch.bool [2, 3] to fit x [2, 3, 12], True for a real token, "
            "got torch.float32 [2, 3]",
        ),
    ],
)
def test_errors_of_a_call(shape: tuple[int, ...], mask: Tensor | None, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made()(torch.zeros(shape), key_padding_mask=mask)
