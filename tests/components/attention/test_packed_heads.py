import copy
import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import LinearAttention, LocalAttention, MultiHeadAttention, NystromAttention
from fuselayers.components.attention.packed_heads import PackedHeads


def made(**options: object) -> PackedHeads:
    return PackedHeads(12, **{"num_heads": 6, "num_kv_heads": 2, "head_dim": None, "bias": True, **options})


def test_the_channels_of_the_packed_projection() -> None:
    heads = made()
    x = torch.randn(3, 5, 12)
    q, k, v = heads.project(x)
    packed = heads.qkv(x)
    torch.testing.assert_close(q[:, 4], packed[..., 8:10])
    torch.testing.assert_close(k[:, 1], packed[..., 14:16])
    torch.testing.assert_close(v[:, 0], packed[..., 16:18])
    torch.testing.assert_close(heads.join(q), heads.out(packed[..., :12]))


def test_rotate_turns_queries_and_keys_only() -> None:
    heads = made()
    x = torch.randn(3, 5, 12)
    q, k, v = heads.project(x)
    turned = heads.project(x, rotate=lambda q, k: (q + 1, k + 2))
    for got, expected in zip(turned, (q + 1, k + 2, v), strict=True):
        torch.testing.assert_close(got, expected)


class Adapter(nn.Module):
    """What can be called like the layer, and has nothing else of it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.high = nn.Parameter(torch.randn(layer.out_features, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + x[..., :1] @ self.high.T
        return y


@pytest.mark.parametrize(
    ("attention", "crossed"), [(MultiHeadAttention, False), (MultiHeadAttention, True), (LinearAttention, False)]
)
def test_an_adapter_in_place_of_a_projection_needs_its_call_only(attention: type[PackedHeads], crossed: bool) -> None:
    merged = attention(12, num_heads=6, num_kv_heads=2, causal=False).double()  # type: ignore[call-arg]
    adapted = copy.deepcopy(merged)
    with torch.no_grad():
        for name in ("qkv", "out"):
            adapter = Adapter(getattr(adapted, name)).double()
            setattr(adapted, name, adapter)
            getattr(merged, name).weight[:, :1] += adapter.high
    x, memory = torch.randn(2, 3, 5, 12, dtype=torch.float64)
    given = {"memory": memory} if crossed else {}
    torch.testing.assert_close(adapted(x, **given), merged(x, **given))
    with pytest.raises(ValueError, match=r"^x must be \[B, T, 12\], got \[5, 12\]$"):
        adapted(x[0])


def test_names_of_the_parameters() -> None:
    assert {name: tuple(value.shape) for name, value in made(head_dim=3, bias=False).state_dict().items()} == {
        "qkv.weight": (30, 12),
        "out.weight": (12, 18),
    }


@pytest.mark.parametrize("attention", [LinearAttention, LocalAttention, NystromAttention])
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 5}, "hidden_dim must be a multiple of num_heads, got 12 and 5; or give head_dim"),
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_heads must be a multiple of num_kv_heads, got 6 and 4"),
        ({"num_heads": 6, "head_dim": 0}, "head_dim must be at least 1, got 0"),
    ],
)
def test_errors(attention: type[PackedHeads], options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        attention(12, **options)


def test_what_is_shown() -> None:
    shown = repr(LocalAttention(12, num_heads=6, num_kv_heads=2, window=3)).splitlines()[1].strip()
    assert shown == "num_heads=6, num_kv_heads=2, head_dim=2, window=3, dropout=0.0, causal=True"


@pytest.mark.parametrize("mask", [torch.ones(3, 4, dtype=torch.bool), torch.ones(3, 5)])
def test_errors_of_a_call(mask: Tensor) -> None:
    text = (
        "key_padding_mask must be torch.bool [3, 5] to fit x [3, 5, 12], True for a real token, "
        f"got {mask.dtype} {list(mask.shape)}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        made().project(torch.zeros(3, 5, 12), key_padding_mask=mask)
    with pytest.raises(ValueError, match=r"^x must be \[B, T, 12\], got \[5, 12\]$"):
        made().project(torch.zeros(5, 12))
