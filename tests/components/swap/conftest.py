import pytest

from fuselayers.partition import fallback_warning


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test see warnings that another one in this process has had."""
    monkeypatch.setattr(fallback_warning, "_said", set())
