"""What every attention other than multi_head is held to. Used by their tests.

A reference gets (layer, x_BTD, rotate, real_BT) and is written out in full matrices or plain loops, with none of the
layer's own functions.
"""

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import Choice, Decoder, Encoder, RotaryPosition
from fuselayers.components.attention.inputs import takes
from tests.components.compare import assert_same_step

HIDDEN_DIM = 12
# On top of hidden_dim, of the attentions that have heads.
HEADS = {"all heads": {"num_heads": 6}, "grouped": {"num_heads": 6, "num_kv_heads": 2, "bias": False}}

Reference = Callable[[Any, Tensor, Any, Tensor | None], Tensor]


def padding(tokens: int) -> Tensor:
    """[4, T]: nothing padded, the end padded, the beginning and the middle padded, everything padded."""
    place = torch.arange(tokens)
    inner = (place >= min(2, tokens - 1)) & (place != 4)
    return torch.stack((place >= 0, place < max(1, tokens - 2), inner, place < 0))


def heads_of(layer: Any, x_BTD: Tensor, rotate: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v [B, H, T, C] with as many key heads as query heads."""
    heads, groups, channels = layer.num_heads, layer.num_kv_heads, layer.head_dim
    packed = x_BTD @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias)
    columns = [packed[..., i * channels : (i + 1) * channels] for i in range(heads + 2 * groups)]
    q = torch.stack(columns[:heads], 1)
    k = torch.stack(columns[heads : heads + groups], 1)
    v = torch.stack(columns[heads + groups :], 1)
    if rotate is not None:
        q, k = rotate(q, k)
    of_query = [h * groups // heads for h in range(heads)]
    return q, k[:, of_query], v[:, of_query]


def joined(layer: Any, mixed_BHTC: Tensor) -> Tensor:
    mixed = torch.cat(mixed_BHTC.unbind(1), -1)
    return mixed @ layer.out.weight.T + (0 if layer.out.bias is None else layer.out.bias)


def allowed(tokens: int, real_BT: Tensor | None, *, causal: bool, window: int | None = None) -> Tensor:
    """Return which keys each query may look at: bool [B, 1, T, T]."""
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    pairs = (distance.abs() < (tokens if window is None else window)) & (distance >= (0 if causal else -tokens))
    real_BT = torch.ones(1, tokens, dtype=torch.bool) if real_BT is None else real_BT
    return pairs & real_BT[:, None, None]


def weights_of(scores: Tensor, allowed: Tensor) -> Tensor:
    """Return the softmax over what is allowed; zeros where nothing is."""
    return torch.nan_to_num(scores.masked_fill(~allowed, -torch.inf).softmax(-1)) * allowed


def small(layer: Any) -> Any:
    """Give every parameter normal values: no zeros or ones, and scores of the size that training makes."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
    return layer


def assert_is(
    layer: nn.Module,
    reference: Reference,
    *,
    tokens: int,
    rotated: bool = False,
    padded: bool = False,
    tolerance: float = 1e-8,
) -> None:
    """Fail unless values and gradients are those of the reference, in float64."""
    exact = copy.deepcopy(layer).double()
    rotate = RotaryPosition().rotate if rotated else None
    real_BT = padding(tokens) if padded else None
    inputs = {"rotate": rotate, "key_padding_mask": real_BT}
    given = {name: value for name, value in inputs.items() if name in takes(layer.forward)}

    class Forward(nn.Module):
        def __init__(self, written_out: bool) -> None:
            super().__init__()
            self.layer, self.written_out = exact, written_out

        def forward(self, x: Tensor) -> Tensor:
            return reference(self.layer, x, rotate, real_BT) if self.written_out else self.layer(x, **given)

    x = torch.randn(4, tokens, HIDDEN_DIM, dtype=torch.float64)
    tolerance = 1e-5 if rotated else tolerance  # the angles of rotary are float32
    assert_same_step(Forward(True), Forward(False), x, rtol=tolerance, atol=tolerance)


def assert_padding_is_nothing(layer: nn.Module, *, as_if_absent: bool = True) -> None:
    """Fail unless what padding holds changes no real token, and a padded row is its unpadded self."""
    layer = copy.deepcopy(layer).double()
    for tokens in (7, 129):
        real_BT = padding(tokens)
        x = torch.randn(4, tokens, HIDDEN_DIM, dtype=torch.float64)
        other = torch.where(real_BT[..., None], x, 3 * torch.randn_like(x))
        got = layer(x, key_padding_mask=real_BT)
        torch.testing.assert_close(layer(other, key_padding_mask=real_BT)[real_BT], got[real_BT], rtol=1e-9, atol=1e-9)
        if as_if_absent:
            alone = layer(x[1:2, : tokens - 2])
            torch.testing.assert_close(got[1:2, : tokens - 2], alone, rtol=1e-9, atol=1e-9)


def assert_causal(layer: nn.Module) -> None:
    """Fail unless a later token changes nothing before it, and has no gradient from there."""
    layer = copy.deepcopy(layer).double()
    for tokens, changed in ((7, 4), (129, 70), (129, 128)):
        x = torch.randn(1, tokens, HIDDEN_DIM, dtype=torch.float64, requires_grad=True)
        other = x.detach().clone()
        other[:, changed:] = 3 * torch.randn_like(other[:, changed:])
        for real_BT in (None, torch.arange(tokens)[None] > 1):
            before = layer(x, key_padding_mask=real_BT)[:, :changed]
            after = layer(other, key_padding_mask=real_BT)[:, :changed]
            torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
            (gradient,) = torch.autograd.grad(before.sum(), x)
            assert gradient[:, changed:].abs().max() == 0
            assert gradient[:, changed - 1].abs().max() > 0


def assert_forms(layer: nn.Module, *, rotated: bool, bfloat16_atol: float = 0.05) -> None:
    """Fail unless compiled, low-precision, copied and meta-built forms of the layer give its values."""
    x, real_BT = torch.randn(4, 7, HIDDEN_DIM), padding(7)
    inputs: dict[str, Any] = {"key_padding_mask": real_BT}
    if rotated:
        inputs["rotate"] = RotaryPosition().rotate
    torch.manual_seed(1)
    expected = layer(x, **inputs)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_same_step(lambda x: layer(x, **inputs), lambda x: compiled(x, **inputs), x, rtol=1e-4, atol=1e-4)
    _assert_compiled_for_other_lengths(layer, rotated=rotated)
    assert_no_tokens(layer)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.manual_seed(1)
        torch.testing.assert_close(other(x, **inputs), expected, rtol=0, atol=0)
    for dtype, atol in ((torch.bfloat16, bfloat16_atol), (torch.float16, bfloat16_atol)):
        lower = copy.deepcopy(layer).to(dtype)
        torch.manual_seed(1)
        got = lower(x.to(dtype), **inputs)
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=0.05, atol=atol)
        torch.manual_seed(1)
        with torch.autocast("cpu", dtype):
            torch.testing.assert_close(layer(x, **inputs).float(), expected, rtol=0.05, atol=atol)


def _assert_compiled_for_other_lengths(layer: nn.Module, *, rotated: bool) -> None:
    """From the second length on, the compiler takes the length for a symbol."""
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for tokens in (9, 17, 70):
        x, inputs = torch.randn(2, tokens, HIDDEN_DIM), {"rotate": RotaryPosition().rotate} if rotated else {}
        torch.manual_seed(1)
        expected = layer(x, **inputs)
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x, **inputs), expected, rtol=1e-4, atol=1e-4)


def assert_no_tokens(layer: nn.Module) -> None:
    """Fail unless a sequence of no tokens is refused, and a batch of no sequences goes through."""
    text = f"x must have at least one token to mix, got [2, 0, {HIDDEN_DIM}]; leave empty sequences out"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        layer(torch.zeros(2, 0, HIDDEN_DIM))
    x = torch.zeros(0, 3, HIDDEN_DIM, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x)
    assert gradient.shape == x.shape


def assert_built_on_meta(made: Callable[[], nn.Module]) -> None:
    """Fail unless a layer that was built without memory is the layer it should be, once its state is loaded."""
    layer = made()
    with torch.device("meta"):
        empty = made()
    assert all(value.is_meta for value in (*empty.parameters(), *empty.buffers()))
    filled = empty.to_empty(device="cpu")
    filled.load_state_dict(layer.state_dict())
    x = torch.randn(2, 7, HIDDEN_DIM)
    torch.testing.assert_close(filled(x), layer(x), rtol=0, atol=0)


def assert_trains(model: type[Encoder | Decoder], name: str, **options: Any) -> None:
    """Fail unless one step of training in a model, with every gradient there, lowers its loss."""
    built = model(
        vocab_size=13,
        hidden_dim=HIDDEN_DIM,
        num_layers=2,
        context_length=9,
        attention=Choice(name, options),
        init_std=0.2,
    )
    tokens = torch.randint(13, (3, 7))
    inputs = {"key_padding_mask": padding(7)[:3]} if isinstance(built, Encoder) else {}
    before = built(tokens, tokens, **inputs)
    before.backward()
    with torch.no_grad():
        for parameter in built.parameters():
            assert parameter.grad is not None
            parameter -= 1e-3 * parameter.grad
    assert built(tokens, tokens, **inputs) < before
