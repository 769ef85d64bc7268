import re
from pathlib import Path
from typing import Annotated

import pytest

from fuselayers.components import Choice, Component, options, registry
from fuselayers.components.model import Decoder
from fuselayers.configs import build, compose, to_yaml
from fuselayers.configs.sections import changed, checked_choice, completed


class Wrapper:
    def __init__(
        self,
        *,
        inner: Annotated[Choice | str, Component("norm")] = "layer_norm",
        function: Annotated[str | None, Component("activation")] = None,
        activation: str | None = "gelu",
        block: Choice | str = "transformer",
        note: str = "",
    ) -> None: ...


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OWNERS["feedforward"], "wrapper", Wrapper)


def checked(section: dict[str, object]) -> Choice:
    return checked_choice("feedforward", completed("feedforward", section, where="ff"), where="ff")


def test_the_kind_of_an_option_is_its_mark_or_its_name() -> None:
    assert {option.name: option.kind for option in options("feedforward", "wrapper")} == {
        "inner": "norm",
        "function": "activation",
        "activation": "activation",
        "block": "block",
        "note": None,
    }
    assert options("feedforward", "wrapper")[0].annotation == Choice | str


def test_a_mark_of_no_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Misspelt:
        def __init__(self, *, inner: Annotated[Choice | str, Component("nrom")]) -> None: ...

    monkeypatch.setitem(registry._OWNERS["feedforward"], "misspelt", Misspelt)
    with pytest.raises(ValueError, match=r"^no kind 'nrom'; did you mean 'norm'\?"):
        options("feedforward", "misspelt")


def test_a_marked_option_is_a_section_of_its_kind() -> None:
    section = changed("feedforward", {"name": "wrapper"}, {"inner": {"name": "rms_norm", "eps": 1}}, where="ff")
    assert section == {"name": "wrapper", "inner": {"name": "rms_norm", "eps": 1}}
    assert changed("feedforward", section, {"inner": {"eps": 2}}, where="ff")["inner"] == {"name": "rms_norm", "eps": 2}
    assert checked(section).options["inner"] == Choice("rms_norm", {"eps": 1.0, "unit_offset": False})
    assert checked({"name": "wrapper"}).options["block"] == Choice("transformer")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inner": "rmsnorm"}, "no norm 'rmsnorm'; did you mean 'rms_norm'?"),
        ({"inner": {"epps": 1}}, "no layer_norm option 'epps'; did you mean 'eps'?"),
        ({"inner": {"eps": "small"}}, "ff.inner.eps must be a number, got 'small'"),
        ({"inner": None}, "ff.inner must be a name or a mapping of options, got None"),
        ({"function": "gleu"}, "no activation 'gleu'; did you mean 'gelu'?"),
        ({"activation": "gleu"}, "no activation 'gleu'; did you mean 'gelu'?"),
    ],
)
def test_what_is_refused(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        checked(changed("feedforward", {"name": "wrapper"}, changes, where="ff"))


MIXTURE = {
    "name": "mixture_of_experts",
    "num_experts": 3,
    "expert": {"name": "gated_mlp", "width": 12, "packed": True},
    "shared_experts": 1,
}


@pytest.mark.parametrize(
    ("source", "overrides"),
    [
        ({"feedforward": MIXTURE}, []),
        (
            "gpt_nano",
            [
                "feedforward=mixture_of_experts",
                "feedforward.num_experts=3",
                "feedforward.expert=gated_mlp",
                "feedforward.expert.width=12",
                "feedforward.expert.packed=true",
                "feedforward.shared_experts=1",
            ],
        ),
    ],
)
def test_the_experts_of_a_mixture_come_from_a_config(source: object, overrides: list[str]) -> None:
    config = compose(source, [*overrides, "model.num_layers=1", "fusion=off"])  # type: ignore[arg-type]
    assert config.feedforward.options["expert"].options["width"] == 12
    model = build(config)
    assert isinstance(model, Decoder)
    weights = {name: list(value.shape) for name, value in model.blocks[0].feedforward.state_dict().items()}
    width = model.token.weight.shape[1]
    assert weights == {
        "router.weight": [3, width],
        **{
            f"{expert}.{name}": shape
            for expert in ("experts.0", "experts.1", "experts.2", "shared.0")
            for name, shape in (
                ("gate.weight", [12, width]),
                ("up.weight", [12, width]),
                ("down.weight", [width, 12]),
            )
        },
    }


def test_a_written_config_is_read_again(tmp_path: Path) -> None:
    config = compose({"feedforward": MIXTURE})
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert compose(str(path)) == config


def test_a_mixture_for_some_layers_only() -> None:
    layers = [{"at": "-1", "feedforward": {**MIXTURE, "expert": "mlp"}}]
    model = build(compose({"model": {"num_layers": 2, "layers": layers}}, ["fusion=off"]))
    kinds = [type(block.feedforward).__name__ for block in model.blocks]  # type: ignore[attr-defined, union-attr]
    assert kinds == ["FusedMLP", "MixtureOfExperts"]
    assert type(model.blocks[1].feedforward.experts[0]).__name__ == "MLP"  # type: ignore[index, union-attr]


def test_the_experts_are_fused_as_layers_are() -> None:
    asked = ["feedforward=mixture_of_experts", "feedforward.expert=fused_mlp", "fusion=eager", "fusion.scope=layer"]
    model = build("gpt_nano", asked)
    assert model.blocks[0].feedforward.experts[0].backend == "eager"  # type: ignore[index, union-attr]
