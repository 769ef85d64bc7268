"""The report of `swap`, by site."""

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from ...text_table import readable_bytes, table_lines, wrapped


@dataclass(frozen=True)
class Site:
    """One module that was swapped.

    Attributes:
        name: qualified name.
        kind: the name of its class.
        rule: the rule that fits it; "block" for a whole block.
        backend: of a block: the backend that served its graphs, or the requested one before any is compiled.
        error: the largest error of results, in units of the largest result, or of gradients, in units of the largest
            gradient. The reference is float64, or the original where float64 cannot run. None if it was not verified.
        error_before: the same for the original module.
        saved_before: bytes that it kept for backward, on the inputs of the verification; None if it was not verified.
        saved_after: bytes that it keeps now.
        unverified: why it was not verified, or not whole, though it was asked for.
    """

    name: str
    kind: str
    rule: str
    backend: str = ""
    error: float | None = None
    error_before: float | None = None
    saved_before: int | None = None
    saved_after: int | None = None
    unverified: str = ""


@dataclass(frozen=True)
class Skipped:
    """One module that was not swapped, or that runs its original forward, and why."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, repr=False)
class SwapReport:
    """The result of `swap`. Its text, also at a prompt and in a notebook, is a table as wide as the terminal.

    Attributes:
        level: "layers" or "blocks".
        sites: the modules that were swapped. One may be inside another.
        skipped: the modules that a rule matched but that were not swapped, and the blocks that failed verification or
            could not be verified. Level "auto" may then have swapped layers inside these blocks. If nothing was
            swapped, also one module of each class that no rule fits.
        saved_before: bytes that one training call of the whole model kept for backward; None if it was not verified, or
            does not run in training mode on the batch.
        saved_after: bytes that it keeps now.
        held_after: the part of them that hooks on saved tensors, as in gradient checkpointing and offloading, cannot
            free.
        notes: how the model is called from now on, why nothing was verified or compressed, how to swap what could not
            be verified, or that nothing is saved.
    """

    level: str
    sites: tuple[Site, ...]
    skipped: tuple[Skipped, ...]
    saved_before: int | None = None
    saved_after: int | None = None
    held_after: int | None = None
    notes: tuple[str, ...] = ()

    def require(self, rule: str, *, at_least: int = 1) -> None:
        """Raise unless a rule was found at least `at_least` times. It is for scripts that rely on the rule.

        Raises:
            ValueError: it was found less often; the text lists the rules found and the modules skipped.
        """
        count = sum(site.rule == rule for site in self.sites)
        if count < at_least:
            rules = sorted({site.rule for site in self.sites})
            reasons = "".join(f"\n{line}" for line in _wrapped(self._skipped_lines()))
            raise ValueError(
                f"swap found {count} modules for {rule!r}, at least {at_least} are required; it found these rules: "
                f"{', '.join(rules) or 'none'}{reasons}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, for JSON."""
        return asdict(self)

    def _rows(self) -> list[tuple[str, ...]]:
        """Return the cells of `_COLUMNS`, with one row for all sites with the same class, rule and backend."""
        groups: dict[tuple[str, str, str], list[Site]] = {}
        for site in self.sites:
            groups.setdefault((site.kind, site.rule, site.backend), []).append(site)
        rows: list[tuple[str, ...]] = []
        for (kind, rule, backend), sites in groups.items():
            errors = [site.error for site in sites if site.error is not None]
            error = f"{max(errors):.0e}" if errors else "-"
            before = sum(site.saved_before or 0 for site in sites)
            after = sum(site.saved_after or 0 for site in sites)
            kept = f"{after / before:.2f}" if before else ""
            rows.append((kind, rule, str(len(sites)), error, kept, backend))
        return rows

    def _skipped_lines(self) -> list[str]:
        return _reasons("not swapped", [(part.name, part.kind, part.reason) for part in self.skipped])

    def _unverified_lines(self) -> list[str]:
        unverified = [(site.name, site.kind, site.unverified) for site in self.sites if site.unverified]
        return _reasons("swapped, not verified", unverified)

    def _saved_lines(self) -> list[str]:
        """Return the bytes that a training call keeps, if they were measured."""
        if not self.saved_before or self.saved_after is None:
            return []
        before, after = readable_bytes(self.saved_before), readable_bytes(self.saved_after)
        share = self.saved_after / self.saved_before
        lines = [f"a training call keeps {after} of {before} for backward: {share:.2f}"]
        if self.held_after:
            held = readable_bytes(self.held_after)
            lines.append(f"{held} of them would stay under gradient checkpointing and offloading")
        return lines

    def __repr__(self) -> str:
        lines = [f"swap, level {self.level}: {len(self.sites)} modules"]
        rows = self._rows()
        if rows:
            used = [column for column, name in enumerate(_COLUMNS) if column < 3 or any(row[column] for row in rows)]
            table = [tuple(row[column] for column in used) for row in (tuple(_COLUMNS), *rows)]
            width = shutil.get_terminal_size().columns
            lines += table_lines(table, width, left=range(len(used)))
            names = [name for column, name in enumerate(_COLUMNS) if column in used and _COLUMNS[name]]
            lines += _wrapped([f"  {name}: {_COLUMNS[name]}" for name in names])
        return "\n".join([*lines, *_wrapped(self._text_lines())])

    def _text_lines(self) -> list[str]:
        return [*self._saved_lines(), *self.notes, *self._unverified_lines(), *self._skipped_lines()]


_COLUMNS: Final[Mapping[str, str]] = {
    "class": "",
    "rule": "",
    "modules": "",
    "error": "largest error of results and gradients, in units of the largest value; - not verified",
    "kept": "bytes kept for backward, as a share of the original module's",
    "backend": "what compiled the blocks; auto: not verified",
}


def _reasons(said: str, modules: list[tuple[str, str, str]]) -> list[str]:
    """Return one line for all modules of a class with the same reason. Each module is its name, class and reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in modules:
        groups.setdefault((kind, reason), []).append(name)
    lines: list[str] = []
    for (kind, reason), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"{said}: {names[0] or 'the model'} ({kind}){more}: {reason}")
    return lines


def _wrapped(lines: list[str]) -> list[str]:
    """Return the lines, wrapped to the width of the terminal."""
    width = shutil.get_terminal_size().columns
    return [part for line in lines for part in wrapped(line, width)]
