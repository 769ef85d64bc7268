"""The results of `check`: one cell for each check and dtype, printed as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["VALUES", "Cell", "Report"]

VALUES: Final = "values and gradients"
"""The check that every other one depends on."""


@dataclass(frozen=True)
class Cell:
    """One check in one dtype.

    Attributes:
        check: its name in the report.
        dtype: "float32".
        outcome: of the check.
        reason: why it failed or does not apply; a remark on a pass.
    """

    check: str
    dtype: str
    outcome: Literal["pass", "fail", "n/a"]
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """The contract of one function. `print` shows it as a table, with the reasons below.

    Attributes:
        subject: what was checked.
        cells: check by check, dtype by dtype.
    """

    subject: str
    cells: Sequence[Cell]

    @property
    def failures(self) -> list[Cell]:
        """The cells that failed."""
        return [cell for cell in self.cells if cell.outcome == "fail"]

    @property
    def shows_nothing(self) -> bool:
        """Whether values and gradients passed in no dtype; without that check, whether no check passed.

        A reference that always raises, or a misspelt option, causes this.
        """
        needed = [cell for cell in self.cells if cell.check == VALUES] or self.cells
        return not any(cell.outcome == "pass" for cell in needed)

    def raise_on_failure(self) -> None:
        """Raise if a check failed or the report `shows_nothing`.

        Raises:
            AssertionError: the text is the whole report.
        """
        if self.failures or self.shows_nothing:
            raise AssertionError(str(self))

    def __str__(self) -> str:
        dtypes = list(dict.fromkeys(cell.dtype for cell in self.cells))
        checks = list(dict.fromkeys(cell.check for cell in self.cells))
        outcomes = {(cell.check, cell.dtype): cell.outcome for cell in self.cells}
        width = max(map(len, checks), default=0)
        left_out = sum(cell.outcome == "n/a" for cell in self.cells)
        counts = f"{len(self.failures)} of {len(self.cells)} checks failed" + f", {left_out} n/a" * (left_out > 0)
        nothing = "; that shows nothing: no values were compared" * (self.shows_nothing and not self.failures)
        head = [f"{self.subject}: {counts}{nothing}", ""]
        table = ["  ".join([" " * width, *(f"{dtype:8}" for dtype in dtypes)])]
        table += [
            "  ".join([f"{check:{width}}", *(f"{_shown(outcomes[check, dtype]):8}" for dtype in dtypes)])
            for check in checks
        ]
        return "\n".join([*head, *(line.rstrip() for line in table), *self._reasons()])

    def _reasons(self) -> list[str]:
        # One line for all dtypes of a check that have one reason.
        dtypes: dict[tuple[str, str, str], list[str]] = {}
        for cell in self.cells:
            if cell.reason:
                dtypes.setdefault((_shown(cell.outcome), cell.check, cell.reason), []).append(cell.dtype)
        lines = [
            f"{outcome:4}  {check} ({', '.join(found)}): {reason}" for (outcome, check, reason), found in dtypes.items()
        ]
        return ["", *sorted(lines)] if lines else []


def _shown(outcome: str) -> str:
    return "FAIL" if outcome == "fail" else outcome
