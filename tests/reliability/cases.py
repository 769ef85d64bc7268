"""The cases of a test that tries many: seeds or names.

`make test` tries the first few cases of each kind, `make test-all` the others as well. RELIABILITY_CASES chooses cases:

    RELIABILITY_CASES=1000:2000     the seeds from 1000 up to 2000, for a longer hunt
    RELIABILITY_CASES=1017          one seed, as a failure names it
    RELIABILITY_CASES=mv,nn.GELU    cases with these names
"""

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

CHOSEN: Final = os.environ.get("RELIABILITY_CASES", "")
_SHOWN: Final = 20


@dataclass(frozen=True)
class Cases:
    """The cases of a test, the first few of them or the others."""

    test: str
    few: bool

    def of_seeds(self, check: Callable[[random.Random], None], *, few: int, all: int) -> None:
        """Run `check` with the random generators of the seeds from 0 on; see `of_names`."""
        first, _, end = CHOSEN.partition(":")
        chosen = (
            range(int(first), int(end or int(first) + 1)) if CHOSEN else range(few) if self.few else range(few, all)
        )
        self._run(lambda seed: check(random.Random(seed)), chosen)

    def of_names(self, check: Callable[[str], None], names: Sequence[str], *, few: int | Sequence[str]) -> None:
        """Run `check` for names: `few` of them (random ones if it is a number) in the quick part, the others in the
        slow part.

        Raises:
            ValueError: RELIABILITY_CASES names a case that is not there.
            AssertionError: cases failed; the text names them and the command that repeats them.
        """
        if CHOSEN:
            missing = [name for name in CHOSEN.split(",") if name not in names]
            if missing:
                raise ValueError(f"RELIABILITY_CASES names no case of this test: {', '.join(missing)}")
            self._run(check, CHOSEN.split(","))
            return
        shuffled = random.Random(0).sample(names, len(names))
        quick = shuffled[:few] if isinstance(few, int) else few
        self._run(check, quick if self.few else [name for name in shuffled if name not in quick])

    def _run(self, check: Callable[..., None], cases: Sequence[object]) -> None:
        failures: dict[object, Exception] = {}
        for case in cases:
            try:
                check(case)
            except Exception as error:
                failures[case] = error
        if failures:
            shown = [
                f"{case}: {type(error).__name__}: {str(error).strip()[:300]}"
                for case, error in [*failures.items()][:_SHOWN]
            ]
            again = ",".join(str(case) for case in failures) if isinstance(cases[0], str) else next(iter(failures))
            raise AssertionError(
                f"{len(failures)} of {len(cases)} did not hold; to repeat: RELIABILITY_CASES='{again}' "
                f"python -m pytest '{self.test}'\n" + "\n".join(shown)
            ) from next(iter(failures.values()))
