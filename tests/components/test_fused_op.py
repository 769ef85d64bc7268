import pytest

from fuselayers.components import FusedMLP, GatedMLP


@pytest.mark.parametrize("layer", [FusedMLP, GatedMLP])
@pytest.mark.parametrize(
    ("backend", "partition", "text"),
    [
        ("inducter", "min_cut", "no backend 'inducter'; did you mean 'inductor'"),
        ("eager", "mincut", "no partition.* 'mincut'; did you mean 'min_cut'"),
    ],
)
def test_an_unknown_name_fails_when_the_layer_is_built(layer: type, backend: str, partition: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layer(4, backend=backend, partition=partition)
