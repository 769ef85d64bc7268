"""The measured tables of the pages agree with their data."""

from pathlib import Path

import pytest

from docs.figures import ROOT, pages, written

PAGES = [page for page in pages() if "<!-- figures of " in page.read_text(encoding="utf-8")]


def test_pages_have_figures() -> None:
    assert {page.name for page in PAGES} >= {"README.md", "benchmarks.md", "fine_tune_gpt2.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_are_those_of_the_data(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert written(text) == text, "its data changed, or somebody typed a figure: python -m docs.figures"
