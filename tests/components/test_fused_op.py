import pytest

from fuselayers.components import FusedMLP


@pytest.mark.parametrize(
    ("backend", "partition", "text"),
    [
        ("inducter", "min_cut", "no backend 'inducter'; did you mean 'inductor'"),
        ("eager", "mincut", "no partition.* 'mincut'; did you mean 'min_cut'"),
    ],
)
def test_an_unknown_name_fails_when_the_layer_is_built(backend: str, partition: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        FusedMLP(4, backend=backend, partition=partition)
