from dataclasses import dataclass

import pytest

from fuselayers.configs.settings import check_settings, setting, settings_of


@dataclass(frozen=True, kw_only=True)
class Section:
    count: int = setting("how many", default=3, minimum=1)
    share: float = setting("which share", default=0.5, above=0, below=1)
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


def test_converts_what_is_meant() -> None:
    section = Section(share=0.25, tags=["a", "b"])  # type: ignore[arg-type]
    assert section.tags == ("a", "b")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"count": 0}, r"^section.count must be at least 1, got 0$"),
        ({"share": 1.0}, r"^section.share must be above 0 and below 1, got 1.0$"),
        ({"kind": "Word"}, r"^section.kind must be a lower-case word, got 'Word'$"),
        ({"count": "three"}, r"^section.count must be .*, got 'three'$"),
        ({"count": True}, r"^section.count must be .*, got True$"),
    ],
)
def test_errors(values: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Section(**values)  # type: ignore[arg-type]
