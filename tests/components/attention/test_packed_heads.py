import copy
from typing import Any

import pytest
import torch

from fuselayers.components import get
from tests.components.adapter import Adapter
from tests.components.attention.contract import HIDDEN_DIM, padding

PACKED, ALONG_TOKENS = ("qkv", "out"), ("key_projection", "value_projection")
MEMORY = torch.linspace(-1, 1, 4 * 3 * HIDDEN_DIM, dtype=torch.float64).view(4, 3, HIDDEN_DIM)


@pytest.mark.parametrize(
    ("name", "options", "projections", "inputs"),
    [
        ("multi_head", {}, PACKED, {}),
        ("multi_head", {}, PACKED, {"memory": MEMORY}),
        ("linear", {}, PACKED, {}),
        ("linformer", {"context_length": 5}, ALONG_TOKENS, {}),
        ("linformer", {"context_length": 11}, ALONG_TOKENS, {"key_padding_mask": padding(5)}),
    ],
)
def test_an_adapter_in_place_of_a_projection_needs_its_call_only(
    name: str, options: dict[str, Any], projections: tuple[str, ...], inputs: dict[str, Any]
) -> None:
    merged = get("attention", name)(HIDDEN_DIM, num_heads=6, num_kv_heads=2, **options).double()
    adapted = copy.deepcopy(merged)
    with torch.no_grad():
        for projection in projections:
            adapter = Adapter(getattr(adapted, projection)).double()
            setattr(adapted, projection, adapter)
            getattr(merged, projection).weight.add_(adapter.high @ adapter.low)
    x = torch.randn(4, 5, HIDDEN_DIM, dtype=torch.float64)
    torch.testing.assert_close(adapted(x, **inputs), merged(x, **inputs))
    with pytest.raises(ValueError, match=r"^x must be \[B, T, 12\], got \[5, 12\]$"):
        adapted(x[0])
