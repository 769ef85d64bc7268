import copy

import pytest
import torch

from fuselayers.components import LinearAttention, MultiHeadAttention
from fuselayers.components.attention.packed_heads import PackedHeads
from tests.components.adapter import Adapter


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
            getattr(merged, name).weight.add_(adapter.high @ adapter.low)
    x, memory = torch.randn(2, 3, 5, 12, dtype=torch.float64)
    inputs = {"memory": memory} if crossed else {}
    torch.testing.assert_close(adapted(x, **inputs), merged(x, **inputs))
    with pytest.raises(ValueError, match=r"^x must be \[B, T, 12\], got \[5, 12\]$"):
        adapted(x[0])
