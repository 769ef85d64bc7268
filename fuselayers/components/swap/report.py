"""What `swap` did, by site."""

import textwrap
from collections.abc import Mapping
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
        rule: the rule that fits it; "block" for a whole block.
        backend: of a block the backend of `fuse`. Of layers, what ran this library's ops in the verification, each of
            which chooses by device, size and dtype: "triton" and "cpp" for kernels,
            "eager" for plain torch alone; "auto" where it was not verified.
        error: the largest error of results and gradients against float64, in units of the tensor's largest value; None
            where it was not verified.
        error_before: the same of the original module.
        saved_before: bytes that it kept for backward, on the inputs of the verification; None as above.
        saved_after: bytes that it keeps now.
    """

    name: str
    kind: str
    rule: str
    backend: str = "auto"
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


@dataclass(frozen=True, repr=False)
class SwapReport:
    """What `swap` did. Its text, also at a prompt and in a notebook, is a table.

    Attributes:
        level: "layers" or "blocks".
        sites: the modules that were swapped. One may be inside of another.
        skipped: those that stayed as they were: a rule matched, or nothing was found in the whole model.
        saved_before: bytes that one call of the whole model kept alive for backward, in training mode; None where it
            was not verified, or does not run so on the batch.
        saved_after: bytes that it keeps now.
        held_after: those of them that hooks on saved tensors cannot free, as gradient checkpointing and offloading do.
        notes: what else to know: how the model is called from now on, why nothing was verified, what the other level
            saves.
    """

    level: str
    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]
    saved_before: int | None = None
    saved_after: int | None = None
    held_after: int | None = None
    notes: tuple[str, ...] = ()

    def require(self, rule: str, *, at_least: int = 1) -> None:
        """Raise unless a rule was found so often: for a script that relies on it.

        Raises:
            ValueError: it was found less often; the text says what was found, and what was skipped.
        """
        count = sum(site.rule == rule for site in self.sites)
        if count < at_least:
            found = sorted({site.rule for site in self.sites})
            reasons = "".join(f"\n{line}" for line in self._skipped_lines())
            raise ValueError(
                f"swap found {count} modules for {rule!r}, at least {at_least} are required; it found these rules: "
                f"{', '.join(found) or 'none'}{reasons}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, ...]]:
        """One row for all sites of a class with the same rule."""
        groups: dict[tuple[str, str, str], list[Site]] = {}
        for site in self.sites:
            groups.setdefault((site.kind, site.rule, site.backend), []).append(site)
        rows: list[tuple[str, ...]] = []
        for (kind, rule, backend), sites in groups.items():
            errors = [site.error for site in sites if site.error is not None]
            row = (
                textwrap.shorten(kind, 32, placeholder="...") if len(kind) <= 32 else f"{kind[:29]}...",
                rule,
                str(len(sites)),
                f"{max(errors):.0e}" if errors else "-",
                _ratio([site.saved_before for site in sites], [site.saved_after for site in sites]),
                backend,
            )
            rows.append(row)
        return rows

    def _skipped_lines(self) -> list[str]:
        """One line for all modules of a class with the same reason."""
        groups: dict[tuple[str, str], list[str]] = {}
        for skipped in self.skipped:
            groups.setdefault((skipped.kind, skipped.reason), []).append(skipped.name)
        lines: list[str] = []
        for (kind, reason), names in groups.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines += _wrapped(f"not swapped: {names[0] or 'the model'} ({kind}){more}: {reason}")
        return lines

    def __repr__(self) -> str:
        lines = [f"swap, level {self.level}: {len(self.sites)} modules"]
        rows = self._rows()
        used = [column for column, name in enumerate(_COLUMNS) if column < 3 or any(row[column] for row in rows)]
        table = [tuple(row[column] for column in used) for row in (tuple(_COLUMNS), *rows)]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table if rows else ():
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines += _wrapped("  ".join(cells))
        for column in used if rows else ():
            name = list(_COLUMNS)[column]
            lines += _wrapped(f"  {name}: {_COLUMNS[name]}") if _COLUMNS[name] else []
        if self.saved_before and self.saved_after is not None:
            share = self.saved_after / self.saved_before
            lines += _wrapped(
                f"a training call keeps {_bytes(self.saved_after)} of {_bytes(self.saved_before)} for backward: "
                f"{share:.2f}"
            )
            if self.held_after:
                lines += _wrapped(
                    f"{_bytes(self.held_after)} of them would stay under gradient checkpointing and offloading"
                )
        for note in self.notes:
            lines += _wrapped(note)
        return "\n".join([*lines, *self._skipped_lines()])


_COLUMNS: Final[Mapping[str, str]] = {
    "class": "",
    "rule": "",
    "modules": "",
    "error": "largest error of results and gradients, in units of the largest value; - not verified",
    "kept": "bytes kept for backward, as a share of the original module's",
    "backend": "what ran; auto: not verified",
}


def _ratio(before: list[Any], after: list[Any]) -> str:
    """New to old, of all sites that were measured."""
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old is not None and new is not None]
    total = sum(old for old, _ in pairs)
    return f"{sum(new for _, new in pairs) / total:.2f}" if total else ""


def _bytes(number: int) -> str:
    for scale, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return f"{number} bytes"


def _wrapped(line: str) -> list[str]:
    if len(line.rstrip()) <= _WIDTH:
        return [line.rstrip()]
    return textwrap.wrap(line, _WIDTH, subsequent_indent="    ", break_on_hyphens=False)
