"""Sphinx's settings for the site. `make docs` builds it; a warning fails the build."""

import re
import sys
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sphinx.application import Sphinx  # noqa: E402
from sphinx.pycode import ModuleAnalyzer  # noqa: E402

from docs.docstrings import as_restructured_text  # noqa: E402
from docs.tables import filled  # noqa: E402
from fuselayers import __version__  # noqa: E402

project = "fuselayers"
version = release = __version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]

html_theme = "furo"
html_title = "fuselayers"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Links to headings of other pages: `model.md#layers-that-differ`.
myst_heading_anchors = 4

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False
toc_object_entries_show_parents = "hide"
maximum_signature_line_length = 72


def setup(app: Sphinx) -> None:
    """Fill the markers of pages, and read docstrings as this project writes them."""
    app.connect("source-read", _fill)
    # Before napoleon, which reads the sections.
    app.connect("autodoc-process-docstring", _read_docstring, priority=400)
    app.connect("autodoc-before-process-signature", _fold_overloads)
    app.connect("autodoc-process-signature", _shorten)


def _fill(app: Sphinx, page: str, source: list[str]) -> None:
    source[0] = filled(source[0])


def _read_docstring(app: Sphinx, what: str, name: str, value: object, options: Any, lines: list[str]) -> None:
    # A value inherits the docstring of its type, such as `dict`, which does not describe the value.
    inherited = what == "data" and lines and lines[0] in (type(value).__doc__ or "").splitlines()
    lines[:] = [] if inherited else as_restructured_text(lines)


def _fold_overloads(app: Sphinx, value: object, bound_method: bool) -> None:
    """Forget overloads, so that autodoc shows the one signature of the implementation."""
    analyzer = ModuleAnalyzer.for_module(getattr(value, "__module__", "fuselayers"))
    analyzer.analyze()
    analyzer.overloads.clear()


def _shorten(
    app: Sphinx, what: str, name: str, value: object, options: Any, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show `Annotated[int, Range(...)]` as `int`, since the guide's tables have the ranges; and `<object>` as `...`."""
    plain = re.sub(r"Annotated\[(.+?), [~\w.]*(?:Range|Component)\([^)]*\)\]", r"\1", arguments or "")
    plain = re.sub(r"<[^<>]*>", "...", plain)
    return plain or arguments, returned
