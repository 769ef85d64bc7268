"""What `swap` did, by site."""

import html
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Site", "Skipped", "SwapReport"]


@dataclass(frozen=True)
class Site:
    """One module that was swapped.

    Attributes:
        name: qualified name.
        kind: the name of its class.
        rules: the rules that were found in its forward; "block" for a whole block.
        error: the largest error of results and gradients against float64, in units of the tensor's largest value; None
            where it was not verified.
        error_before: the same of the original module.
        saved_before: bytes that it saved for backward, on the inputs of the verification; None as above.
        saved_after: bytes that it saves now.
    """

    name: str
    kind: str
    rules: tuple[str, ...]
    error: float | None = None
    error_before: float | None = None
    saved_before: int | None = None
    saved_after: int | None = None


@dataclass(frozen=True)
class Skipped:
    """One module that was not swapped, swapped back, or runs its original forward, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True)
class SwapReport:
    """What `swap` did.

    Attributes:
        level: "layers" or "blocks".
        sites: the modules that were swapped.
        skipped: those that a rule matched and that stayed as they were, and why.
    """

    level: str
    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]

    @property
    def saved_before(self) -> int:
        """Bytes that all verified sites saved for backward."""
        return sum(site.saved_before or 0 for site in self.sites)

    @property
    def saved_after(self) -> int:
        """Bytes that they save now."""
        return sum(site.saved_after or 0 for site in self.sites)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, ...]]:
        kinds: dict[tuple[str, tuple[str, ...]], list[Site]] = {}
        for site in self.sites:
            kinds.setdefault((site.kind, site.rules), []).append(site)
        rows: list[tuple[str, ...]] = []
        for (kind, rules), sites in kinds.items():
            errors = [site.error for site in sites if site.error is not None]
            before, after = sum(site.saved_before or 0 for site in sites), sum(site.saved_after or 0 for site in sites)
            counted = ", ".join(name if count == 1 else f"{count} {name}" for name, count in Counter(rules).items())
            rows.append(
                (
                    kind,
                    str(len(sites)),
                    counted,
                    f"{max(errors):.1e}" if errors else "not verified",
                    f"{after / before:.2f}" if before else "",
                )
            )
        return rows

    def __str__(self) -> str:
        lines = [f"swap, level {self.level}: {len(self.sites)} modules"]
        rows = [("class", "modules", "rules", "error", "saved bytes, new / old"), *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        if self.sites:
            lines += [
                "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
            ]
        lines += [f"not swapped: {one.name} ({one.kind}): {one.reason}" for one in self.skipped]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [("class", "modules", "rules", "error", "saved bytes, new / old"), *self._rows()]
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        skipped = "".join(
            f"<li>{html.escape(one.name)} ({html.escape(one.kind)}): {html.escape(one.reason)}</li>"
            for one in self.skipped
        )
        return f"<p>swap, level {self.level}</p><table>{body}</table>" + (f"<ul>{skipped}</ul>" if skipped else "")
