import pytest

from fuselayers.configs.references import resolved


def test_a_reference_becomes_what_it_names() -> None:
    sections = {"a": {"x": 3, "deep": {"y": "${a.x}"}}, "b": {"z": "${a.deep.y}", "list": ["${a.x}", 1]}}
    assert resolved(sections) == {"a": {"x": 3, "deep": {"y": 3}}, "b": {"z": 3, "list": [3, 1]}}
    assert sections["b"]["z"] == "${a.deep.y}"  # the caller's own is not changed


@pytest.mark.parametrize(
    ("sections", "text"),
    [
        ({"a": {"x": "${b.y}"}}, r"^a.x refers to \$\{b.y\}, which this config does not have$"),
        ({"a": {"x": "${b.y}"}, "b": {"y": {"z": 1}}}, r"^a.x refers to \$\{b.y\}, which is no single value$"),
        ({"a": {"x": "${a.y}", "y": [1]}}, r"^a.x refers to \$\{a.y\}, which is no single value$"),
        (
            {"a": {"x": "${a.y}", "y": "${a.x}"}},
            r"^a.x refers to itself, through \$\{a.y\} -> \$\{a.x\}; give it a value$",
        ),
    ],
)
def test_errors(sections: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolved(sections)
