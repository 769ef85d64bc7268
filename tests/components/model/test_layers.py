import re

import pytest

from fuselayers.components import Choice, LayerChange
from fuselayers.components.model.layers import changed_parts, matching_layers


@pytest.mark.parametrize("at", ["0", "-1", "-6", "5", ":", "::2", "1::2", ":3", "-2:", "4:1:-1", " 1 : 3 "])
def test_it_is_what_a_list_gives(at: str) -> None:
    layers = list(range(6))
    expected = eval(f"layers[{at}]", {"layers": layers})
    assert list(matching_layers(at, 6)) == (expected if isinstance(expected, list) else [expected])


@pytest.mark.parametrize("at", ["", "a", "1:2:3:4", "1.0", "1,2", "::0", "__import__('os')"])
def test_what_is_no_index_and_no_slice(at: str) -> None:
    with pytest.raises(ValueError, match=r'^layers\.at must be an index or a slice such as "0", "1::2" or ":3", got '):
        matching_layers(at, 6)


@pytest.mark.parametrize("at", ["6", "-7", "7:", "3:3"])
def test_what_names_no_layer(at: str) -> None:
    with pytest.raises(ValueError, match=rf"^layers\.at '{at}' names none of the 6 layers, 0 to 5$"):
        matching_layers(at, 6)


def test_a_change_of_nothing() -> None:
    text = "layers.at '0' changes nothing; name a component, one of attention, feedforward, norm, residual, block"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        LayerChange("0")


def test_the_later_change_of_a_part_counts() -> None:
    parts = {"attention": "multi_head", "feedforward": "mlp"}
    narrow = Choice("mlp", {"expansion": 1.0})
    changes = [
        LayerChange("1::2", feedforward="gated_mlp", norm="rms_norm"),
        LayerChange("-1", feedforward=narrow),
    ]
    assert changed_parts(parts, changes, num_layers=4) == [
        parts,
        {**parts, "feedforward": "gated_mlp", "norm": "rms_norm"},
        parts,
        {**parts, "feedforward": narrow, "norm": "rms_norm"},
    ]
    assert changed_parts(parts, (), num_layers=2) == [parts, parts]
