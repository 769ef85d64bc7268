from pathlib import Path

import pytest

from fuselayers.cli.main import main
from fuselayers.components import registry
from fuselayers.configs import choices
from fuselayers.configs.group_files import GROUPS


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line for each row, so that its cells follow each other."""
    monkeypatch.setenv("COLUMNS", "300")


def _list(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["list", *arguments]) == 0
    return capsys.readouterr().out


def _tables(out: str) -> dict[str, str]:
    """The text of each kind's table."""
    found: dict[str, str] = {}
    kind = ""
    for line in out.splitlines():
        if line.strip() in registry.KINDS and not line.startswith(" "):
            kind = line.strip()
        found[kind] = found.get(kind, "") + line + "\n"
    return found


def test_prints_every_registered_component_with_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    tables = _tables(_list(capsys))
    assert set(tables) == {kind for kind in registry.KINDS if registry.names(kind)}
    for kind, text in tables.items():
        words = text.split()
        for name in registry.names(kind):
            assert name in words, (kind, name)
            for option in registry.options(kind, name):
                assert option.name in words, (kind, name, option.name)


def test_an_option_has_its_type_its_default_and_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(_list(capsys, "feedforward").split())
    options = {option.name: option for option in registry.options("feedforward", "mlp")}
    assert "expansion float above 0 4.0" in text
    assert "dropout float at least 0 and at most 1 0.0" in text
    assert "activation str | None 'gelu'" in text
    first_words = " ".join(options["expansion"].doc.split()[:3])
    assert first_words
    assert first_words in text
    assert "layer_norm" not in text


def test_overrides_show_the_config_they_make_and_its_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    out = _list(capsys, "model=gpt2_small")
    assert "124,439,808 parameters" in out
    assert "hidden_dim: 768" in out
    assert "name: rms_norm" in _list(capsys, "norm=rms_norm")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["feedforwrd"], "no kind 'feedforwrd'; did you mean 'feedforward'? there are: activation, attention"),
        (["norm", "block"], "list takes one kind or overrides key=value, got norm block"),
        (["norm", "model=gpt_nano"], "list takes one kind or overrides key=value, got norm model=gpt_nano"),
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
    ("kind", "words"),
    [
        ("residual", "sandwich layer_scale float | None above 0 None"),
        ("position", "learned no options none no options relative num_buckets int at least 1 32"),
        ("train", "beta2 float at least 0 and below 1 0.95"),
        ("fusion", "scope 'none' | 'layer' | 'block' | 'model' 'model'"),
    ],
)
def test_every_kind_and_section_has_a_table(capsys: pytest.CaptureFixture[str], kind: str, words: str) -> None:
    assert words in " ".join(_list(capsys, kind).split())


@pytest.mark.parametrize("group", GROUPS)
def test_what_a_group_chooses_from_is_below_its_table(capsys: pytest.CaptureFixture[str], group: str) -> None:
    _, _, below = " ".join(_list(capsys, group).split()).rpartition(f" {group}= takes ")
    assert below.split(", ") == list(choices(group))


def test_files_of_ones_own_are_among_the_choices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("defaults: [gpt_nano]\nhidden_dim: 32\n")
    found = f"hydra.searchpath=[{tmp_path}]"
    for arguments in (["model", found], [found, "model"]):
        assert ", mine, " in " ".join(_list(capsys, *arguments).split())
    assert ", mine, " in " ".join(_tables(_list(capsys, found))["model"].split())
    assert ", mine, " not in " ".join(_list(capsys, "model").split())
    assert "hidden_dim: 32" in _list(capsys, "model=mine", found)
    assert main(["list", "mine", found]) == 2
    assert capsys.readouterr().err.endswith("; to see what it is, write model=mine\n")


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("gpt2_small", "train; to see what it is, write model=gpt2_small"),
        ("rotary", "; to see what it is, write position=rotary"),
        ("quick", "; to see what it is, write train=quick"),
        ("gpt2_smal", "train"),
    ],
)
def test_a_choice_in_place_of_a_kind_is_told_how_it_is_written(
    capsys: pytest.CaptureFixture[str], name: str, end: str
) -> None:
    assert main(["list", name]) == 2
    assert capsys.readouterr().err.endswith(f"{end}\n")


def test_a_search_path_that_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "model", "hydra.searchpath=[/nowhere/at/all]"]) == 2
    assert capsys.readouterr().err.startswith("fuselayers: hydra.searchpath: there is no folder /nowhere/at/all")
