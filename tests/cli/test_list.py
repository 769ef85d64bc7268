from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.components import options, registry
from fuselayers.configs import choices
from fuselayers.configs.sections import COMPONENT_GROUPS, GROUPS


def _list(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["list", *arguments]) == 0
    return capsys.readouterr().out


def test_every_component_has_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _list(capsys).splitlines()
    shown: dict[str, list[str]] = {}
    kind = ""
    for line in lines:
        if line in (*registry.KINDS, "in a config"):
            kind = line
        elif line.startswith("  "):
            shown.setdefault(kind, []).append(line.split()[0])
    names = [group for group in GROUPS if group not in COMPONENT_GROUPS]
    assert [line for line in shown.pop("in a config") if line.endswith("=")] == [f"{name}=" for name in names]
    assert shown == {kind: list(registry.names(kind)) for kind in registry.KINDS}
    assert "  silu          x sigmoid(x), also called swish" in lines


def test_a_pipe_gets_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    summary = "Three linear layers: the activated gate multiplies `up`, and `down` projects the product back to D"
    assert f"  gated_mlp           {summary}" in _list(capsys).splitlines()
    lines = _list(capsys, "feedforward.gated_mlp").splitlines()
    assert lines[:2] == ["feedforward.gated_mlp", f"  {summary}"]
    assert len(lines) == 2 + len(options("feedforward", "gated_mlp"))


def test_a_component_shows_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    for kind in registry.KINDS:
        words = _list(capsys, kind).split()
        for name in registry.names(kind):
            assert f"{kind}.{name}" in words
            assert {option.name for option in options(kind, name)} <= set(words), (kind, name)


def test_overrides_show_the_config_they_make_and_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    out = _list(capsys, "model=llama_tiny", "feedforward.activation=relu")
    assert "4,361,472 parameters" in out
    assert "hidden_dim: 256" in out
    assert "activation: relu" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["feedforwrd"], "no kind 'feedforwrd'; did you mean 'feedforward'? there are: activation, attention"),
        (["feedforward.mpl"], "no feedforward 'mpl'; did you mean 'mlp'? there are: conv_mlp, "),
        (["train.stepz"], "no train option 'stepz'; did you mean 'steps'?"),
        (["norm", "block"], "list takes one kind or overrides key=value, got norm block"),
        (["feedforward=mpl"], "no feedforward 'mpl'; did you mean 'mlp'?"),
    ],
)
def test_bad_input_gets_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["list", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"fuselayers: {text}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("residual", "  layer_scale       float | None, above 0, default None: "),
        ("position.learned", "  no options"),
        ("fusion", "  scope      Literal['none', 'block', 'model'], default 'block': "),
    ],
)
def test_every_kind_and_section_has_its_options(capsys: pytest.CaptureFixture[str], kind: str, line: str) -> None:
    assert [text for text in _list(capsys, kind).splitlines() if text.startswith(line)]


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_group_chooses_from_is_below_its_options(capsys: pytest.CaptureFixture[str], group: str) -> None:
    assert _list(capsys, group).splitlines()[-1] == f"{group}= takes {', '.join(choices(group))}"


def test_user_files_are_among_the_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [gpt_nano]\nhidden_dim: 32\n")
    path = f"hydra.searchpath=[{tmp_path}]"
    for arguments in (["model", path], [path, "model"], [path]):
        assert ", mine, " in _list(capsys, *arguments)
    assert ", mine, " not in _list(capsys, "model")
    assert "hidden_dim: 32" in _list(capsys, "model=mine", path)
