import pytest

from docs.docstrings import as_restructured_text


@pytest.mark.parametrize(
    ("markdown", "restructured"),
    [
        ("See `shapes` of `ops.rms_norm`.", "See :py:obj:`shapes` of :py:obj:`.ops.rms_norm`."),
        ("`a * b`, `tril_()`, `a\n| b`", "``a * b``, ``tril_()``, ``a | b``"),
        ("the `Tensor`s", "the :py:obj:`Tensor`\\ s"),
        ("a *b, |c| and d_", r"a \*b, \|c\| and d\_"),
        ("Bullets:\n\n* one\n* two", "Bullets:\n\n* one\n* two"),
        ("Shapes:\n\n    x   [*N]", "Shapes:\n\n.. code-block:: text\n\n        x   [*N]"),
        ("x, y   [N]\n`z`  [1]", ".. code-block:: text\n\n    x, y   [N]\n    `z`  [1]"),
        (">>> f(*x)\n`1`", ">>> f(*x)\n`1`"),
        ("Args:\n    x: `a|b`.\n\n    y: z.", "Args:\n    x: ``a|b``.\n\n    y: z."),
    ],
)
def test_markdown_of_docstrings(markdown: str, restructured: str) -> None:
    assert "\n".join(as_restructured_text(markdown.split("\n"))) == restructured


def test_code_after_a_section_is_code_again() -> None:
    lines = ["Args:", "    x: a.", "", "The formula:", "", "    y = *x"]
    assert as_restructured_text(lines)[-3:] == [".. code-block:: text", "", "        y = *x"]
