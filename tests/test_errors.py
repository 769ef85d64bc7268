import pytest

from fuselayers import errors
from fuselayers.errors import FallbackWarning, say_once


def test_each_text_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())
    with pytest.warns(FallbackWarning) as said:
        for text in ("no compiler", "no driver", "no compiler"):
            say_once(text)
    assert [str(warning.message) for warning in said] == ["no compiler", "no driver"]
