import pytest

from fuselayers.names import no_such


@pytest.mark.parametrize(
    ("kind", "name", "known", "text"),
    [
        (
            "feedforward",
            "mpl",
            ["mlp", "fused_mlp"],
            "no feedforward 'mpl'; did you mean 'mlp'? there are: fused_mlp, mlp",
        ),
        (
            "norm",
            "LayerNorm",
            ("rms_norm", "layer_norm"),
            "no norm 'LayerNorm'; did you mean 'layer_norm'? there are: layer_norm, rms_norm",
        ),
        (
            "feedforward",
            "FUSED-MLP",
            {"mlp", "fused_mlp"},
            "no feedforward 'FUSED-MLP'; did you mean 'fused_mlp'? there are: fused_mlp, mlp",
        ),
        ("backend", "quantum", ["inductor", "eager"], "no backend 'quantum'; there are: eager, inductor"),
        ("norm", "", ["layer_norm"], "no norm ''; there are: layer_norm"),
        ("norm", None, ["layer_norm"], "no norm None; there are: layer_norm"),
        ("silu option", "slope", [], "no silu option 'slope'; there are none"),
    ],
)
def test_text(kind: str, name: object, known: list[str], text: str) -> None:
    assert no_such(kind, name, known) == text


def test_a_long_name_is_cut() -> None:
    text = no_such("norm", 10_000 * "x", ["layer_norm"])
    assert text == f"no norm '{79 * 'x'}...; there are: layer_norm"
