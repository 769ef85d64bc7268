"""What `swap` did, by site."""

import html
import textwrap
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["Site", "Skipped", "SwapReport"]

_WIDTH: Final = 80


@dataclass(frozen=True)
class Site:
    """One module that was swapped.

    Attributes:
        name: qualified name.
        kind: the name of its class.
        rules: the rules that were found in its forward; "block" for a whole block.
        backend: of a block the backend of `fuse`. Of layers, what ran this library's ops in the verification, each of
            which chooses by device, size and dtype: "triton" and "cpp" for kernels,
            "eager" for plain torch alone; "auto" where it was not verified.
        error: the largest error of results and gradients against float64, in units of the tensor's largest value; None
            where it was not verified.
        error_before: the same of the original module.
        saved_before: bytes that it saved for backward, on the inputs of the verification; None as above.
        saved_after: bytes that it saves now.
        seconds_before: median time of its forward and backward in training mode; None unless `timed`.
        seconds_after: the same now.
    """

    name: str
    kind: str
    rules: tuple[str, ...]
    backend: str = "auto"
    error: float | None = None
    error_before: float | None = None
    saved_before: int | None = None
    saved_after: int | None = None
    seconds_before: float | None = None
    seconds_after: float | None = None


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
        sites: the modules that were swapped. One may be inside of another.
        skipped: those that a rule matched and that stayed as they were, and why.
        saved_before: bytes that one call of the whole model saved for backward, in training mode; None where it was not
            verified, or does not run so on the batch.
        saved_after: bytes that it saves now.
    """

    level: str
    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]
    saved_before: int | None = None
    saved_after: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, ...]]:
        """One row for all sites of a class with the same rules."""
        kinds: dict[tuple[str, tuple[str, ...], str], list[Site]] = {}
        for site in self.sites:
            kinds.setdefault((site.kind, site.rules, site.backend), []).append(site)
        rows: list[tuple[str, ...]] = []
        for (kind, rules, backend), sites in kinds.items():
            errors = [site.error for site in sites if site.error is not None]
            counted = ", ".join(name if count == 1 else f"{count} {name}" for name, count in Counter(rules).items())
            rows.append(
                (
                    kind,
                    str(len(sites)),
                    f"{max(errors):.1e}" if errors else "not verified",
                    _ratio([site.saved_before for site in sites], [site.saved_after for site in sites]),
                    _ratio([site.seconds_before for site in sites], [site.seconds_after for site in sites]),
                    backend,
                    counted,
                )
            )
        return rows

    def __str__(self) -> str:
        lines = [f"swap, level {self.level}: {len(self.sites)} modules"]
        rows = [_HEADER, *self._rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER) - 1)]
        for row in rows if self.sites else ():
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
            lines += _wrapped("  ".join(cells)) + _wrapped(row[-1], indent="    ")
        if self.saved_before and self.saved_after is not None:
            share = self.saved_after / self.saved_before
            lines += _wrapped(
                f"a call of the model saves {self.saved_after:,} of {self.saved_before:,} bytes: {share:.2f}"
            )
        for one in self.skipped:
            lines += _wrapped(f"not swapped: {one.name} ({one.kind}): {one.reason}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_HEADER: Final = ("class", "modules", "error", "bytes", "time", "backend", "rules")


def _ratio(before: list[Any], after: list[Any]) -> str:
    """New to old, of all sites that were measured."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    total = sum(old for old, _ in pairs)
    return f"{sum(new for _, new in pairs) / total:.2f}" if total else ""


def _wrapped(line: str, *, indent: str = "") -> list[str]:
    if len(indent + line.rstrip()) <= _WIDTH:
        return [indent + line.rstrip()]
    return textwrap.wrap(line, _WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ")
