from dataclasses import dataclass

import pytest

from fuselayers.components import Range
from fuselayers.components.ranges import Share, Size
from fuselayers.configs.settings import check_settings, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class Section:
    count: Size = setting("how many", unit="apples", default=3)
    share: Share | None = setting("which share", default=0.5)
    kind: str = setting("a lower-case word", default="word", pattern="[a-z]+")
    tags: tuple[str, ...] = setting("names", default=())

    def __post_init__(self) -> None:
        check_settings("section", self)


def test_documents_itself() -> None:
    assert {name: about.doc for name, about in settings_of(Section).items()} == {
        "count": "how many",
        "share": "which share",
        "kind": "a lower-case word",
        "tags": "names",
    }


def test_types_units_and_ranges() -> None:
    about = settings_of(Section)
    assert (about["count"].unit, about["count"].annotation, about["count"].range) == ("apples", int, Range(minimum=1))
    assert (about["share"].unit, about["share"].range) == ("", Range(above=0, maximum=1))
    assert about["kind"].range is None


def test_what_is_null_is_in_every_range() -> None:
    assert Section(share=None).share is None


def test_converts_what_is_meant() -> None:
    section = Section(share=0.25, tags=["a", "b"])  # type: ignore[arg-type]
    assert section.tags == ("a", "b")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"count": 0}, r"^section.count must be at least 1, got 0$"),
        ({"share": 1.5}, r"^section.share must be above 0 and at most 1, got 1.5$"),
        ({"kind": "Word"}, r"^section.kind must be a lower-case word, got 'Word'$"),
        ({"count": "three"}, r"^section.count must be .*, got 'three'$"),
        ({"count": True}, r"^section.count must be .*, got True$"),
    ],
)
def test_errors(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Section(**values)  # type: ignore[arg-type]
