import pytest

from fuselayers.partition import fallback_warning
from fuselayers.partition.fallback_warning import FallbackWarning, say_once


def test_each_text_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback_warning, "_said", set())
    with pytest.warns(FallbackWarning) as said:
        for text in ("no compiler", "no driver", "no compiler"):
            say_once(text)
    assert [str(one.message) for one in said] == ["no compiler", "no driver"]
