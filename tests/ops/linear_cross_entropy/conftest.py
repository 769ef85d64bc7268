import pytest

from fuselayers.ops.linear_cross_entropy import chunks


@pytest.fixture(autouse=True)
def _few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "FEWEST_ROWS", 4)
    monkeypatch.setattr(chunks, "LOGITS_AT_ONCE", 0)
