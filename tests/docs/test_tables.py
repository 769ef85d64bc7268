import re
from pathlib import Path

import pytest

from docs.tables import filled
from fuselayers.components import KINDS, get, names, options
from fuselayers.components.attention.inputs import ABILITIES, is_able
from fuselayers.configs import choices
from fuselayers.configs.hugging_face import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def _text(page: str) -> str:
    return (DOCS / page).read_text(encoding="utf-8")


def _members(kind: str) -> list[str]:
    # Components that other tests register do not count.
    return [name for name in names(kind) if get(kind, name).__module__.startswith("fuselayers.")]


def _rows(markdown: str) -> list[list[str]]:
    """The cells of every row of every table, headings too."""
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def _name(cell: str) -> str:
    """A component's name, from a link to its class."""
    return re.sub(r"^\{py:class\}`(\w+) <.*>`$", r"\1", cell)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_marker_is_left(page: Path) -> None:
    left = re.findall(r"<!-- (?!figures of|end of figures)", filled(page.read_text(encoding="utf-8")))
    assert left == []


def _option_sections(kind: str) -> dict[str, str]:
    """The text under each member's heading, in the order of the page."""
    page = filled(_text(f"components/{kind}.md"))
    sections = re.findall(r"^### \{py:class\}`(\w+) <[\w.]+>`\n(.*?)(?=^##)", page, flags=re.MULTILINE | re.DOTALL)
    return dict(sections)


@pytest.mark.parametrize("kind", KINDS)
def test_the_options_of_every_member_are_on_the_page_of_its_kind(kind: str) -> None:
    sections = _option_sections(kind)
    assert sorted(sections) == _members(kind)
    for name, section in sections.items():
        shown = [row[0] for row in _rows(section) if row[0].startswith("`")]
        assert shown == [f"`{option.name}`" for option in options(kind, name)]
        assert shown or "No options." in section


@pytest.mark.parametrize("kind", KINDS)
def test_names_in_tables_are_links_to_their_classes(kind: str) -> None:
    page = filled(_text(f"components/{kind}.md"))
    for name in _members(kind):
        assert f"\n| {{py:class}}`{name} <fuselayers.components.{get(kind, name).__name__}>` |" in page
        assert f"\n| `{name}` |" not in page


@pytest.mark.parametrize("kind", KINDS)
def test_every_member_is_in_the_hand_written_table(kind: str) -> None:
    page = _text(f"components/{kind}.md")
    described = [row[0].strip("`") for row in _rows(page) if row[0].startswith("`") and len(row) == 3]
    assert sorted(described) == _members(kind)
    assert f"](../pictures/{kind}.svg)" in page


def test_every_kind_is_on_the_page_of_all_kinds() -> None:
    assert [kind for kind in KINDS if f"]({kind}.md)" not in _text("components/index.md")] == []


def test_what_each_attention_can_be_told_is_on_its_page() -> None:
    rows = {
        _name(row[0]): row[1:]
        for row in _rows(filled(_text("components/attention.md")))
        if len(row) == 1 + len(ABILITIES)
    }
    headings = [heading.strip("`") for heading in rows.pop("name")]
    assert sorted(rows) == sorted({*_members("attention"), "---"})
    assert headings == list(ABILITIES)
    for name in _members("attention"):
        assert [cell == "yes" for cell in rows[name]] == [is_able(name, ability) for ability in ABILITIES]


def test_every_family_and_key_is_on_the_page_on_hugging_face() -> None:
    made = filled(_text("hugging_face.md"))
    for architecture in FAMILIES.values():
        for key in architecture.weights.keys:
            assert made.count(f"| `{key.theirs}` | `{key.ours}`") >= 1, key
    for shown in (
        "| `transformer.h.{}.attn.c_attn.weight` | `blocks.{}.attention.qkv.weight`, transposed |",
        "| `transformer.h.{}.attn.c_attn.bias` | `blocks.{}.attention.qkv.bias` |",
        "| `gpt_neox.layers.{}.attention.query_key_value.bias` | `blocks.{}.attention.qkv.bias`, by head |",
        "| `model.decoder.embed_positions.weight` | `position.table.weight`, from row 2 on |",
    ):
        assert made.count(shown) == 1, shown


def test_every_shipped_model_is_on_the_page_on_configs() -> None:
    shown = {row[0]: row[1] for row in _rows(filled(_text("build_from_config.md")))}
    for name in choices("model"):
        assert len(shown[f"`{name}`"]) > 10, name
