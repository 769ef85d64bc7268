import pytest

from fuselayers.errors import FallbackWarning, warn_once


def test_each_text_is_said_once() -> None:
    with pytest.warns(FallbackWarning) as said:
        for text in ("no compiler at all", "no driver at all", "no compiler at all"):
            warn_once(text)
    assert [str(warning.message) for warning in said] == ["no compiler at all", "no driver at all"]
