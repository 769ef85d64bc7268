"""Look for wrong numbers for some time: `python -m tests.fuzz --seconds 600`.

Each round draws examples of one kind. The first three rounds run graphs op by op, a second per example; the next three
use Inductor by default, some ten; and so on.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import resource
import secrets
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.configs import configs
from tests.fuzz.example import Counts, Example
from tests.fuzz.functions import functions
from tests.fuzz.layers import layers

# By kind, the examples of a round op by op, and of a compiled round: Inductor takes little longer for longer ones.
KINDS = {
    "functions": (functions(), functions(40)),
    "layers": (layers(), layers(40)),
    "configs": (configs(), configs()),
}
# A round's seconds.
_QUICK, _COMPILED = 15.0, 60.0
_LONGEST = 180.0  # an example's seconds: Dynamo takes minutes for some symbolic sizes
_MEMORY = 8 << 30  # bytes: a chain of outer products may need any number
_LAST = Path("build/fuzz/last.py")  # the program that ran, should the process crash


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long to look (default: 600)")
    parser.add_argument("--seed", type=int, default=None, help="repeats a run (default: a new one)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="of examples (default: all)")
    parser.add_argument("--stop", action="store_true", help="stop at the first wrong number, also of torch.compile")
    chosen = parser.parse_args(arguments)
    start = secrets.randbelow(10**6) * 1000 if chosen.seed is None else chosen.seed
    print(f"seed {start}", flush=True)
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # torch logs what it raises as well
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _end_example)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    _LAST.parent.mkdir(parents=True, exist_ok=True)
    failing = ("wrong", "torch") if chosen.stop else ("wrong",)
    began, numbers, counts, failures = time.monotonic(), itertools.count(start), Counts(failing), 0
    end = began + chosen.seconds
    for quick, kind in itertools.cycle(itertools.product((True, False), chosen.kinds)):
        if time.monotonic() > end or (failures and chosen.stop):
            break
        before, stop = counts.verdicts.total(), min(end, time.monotonic() + (_QUICK if quick else _COMPILED))
        while time.monotonic() < stop and not (failures and chosen.stop):
            failure = _search(kind, next(numbers), quick=quick, counts=counts, began=began, stop=stop)
            failures += bool(failure)
            print(failure, end="", flush=True)
        print(f"{kind}{'' if quick else ' compiled'}: {counts.verdicts.total() - before} programs", flush=True)
    for verdict, (example, reason) in counts.shortest.items():
        print(f"\nthe shortest of {counts.verdicts[verdict]} {verdict}: {reason}\n\n{example.text}")
        print(f"options {dict(example.options)}, run with {dict(example.how)}\n")
    print(f"seed {start}: {failures} failures; {dict(counts.verdicts)}")
    return 1 if failures else 0


class _Over(BaseException):
    """The time of a round is over. Hypothesis takes other exceptions for failures."""


class _Slow(BaseException):
    """An example takes too long. Its judge takes other exceptions for errors of the example."""


def _end_example(*_: object) -> None:
    raise _Slow


def _search(kind: str, number: int, *, quick: bool, counts: Counts, began: float, stop: float) -> str:
    """Check a few examples of one kind; return the shrunk program of a failure."""
    failed: list[float] = []

    def check(example: Example) -> None:
        if time.monotonic() > stop and not failed:
            raise _Over
        _LAST.write_text(example.program(), encoding="utf-8")
        signal.setitimer(signal.ITIMER_REAL, 0 if failed else _LONGEST)
        try:
            if quick:
                counts.check_quickly(example)
            else:
                counts.check_by_default(example)
                if example.options.get("backend") == "inductor":  # the others belong to the rounds op by op
                    counts.check(example)
        except _Slow:
            counts.add("slow", example, f"more than {_LONGEST:.0f} s")
        except AssertionError:
            if not failed:
                print(f"{kind}, seed {number}: wrong after {time.monotonic() - began:.0f} s; it is shrunk", flush=True)
            failed.append(time.monotonic())
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    # Few: from the tenth on hypothesis mostly changes parts of examples before.
    limits = settings(
        max_examples=9,
        phases=(Phase.generate, Phase.shrink),
        database=None,
        report_multiple_bugs=False,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    try:
        seed(number)(limits(given(KINDS[kind][not quick])(check)))()
    except _Over:
        pass
    except AssertionError as error:
        return f"WRONG, shrunk in {time.monotonic() - failed[0]:.0f} s: {error}\n"
    return ""


if __name__ == "__main__":
    sys.exit(main())
