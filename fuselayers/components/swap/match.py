"""Where a pattern stands in a run, and the run with one step in its place."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from .steps import Global, Local, OfSelf, Operation, Ref, Run, Step

_EITHER_ORDER = frozenset({("binary", "Add"), ("binary", "Mult")})


@dataclass(frozen=True)
class Match:
    """A place where a pattern stands.

    Attributes:
        bound: what each name of the pattern stands for.
        steps: the numbers of the run's steps that it takes the place of, in order.
        results: the numbers of those that are its results.
    """

    bound: Mapping[str, Ref]
    steps: tuple[int, ...]
    results: tuple[int, ...]


def matches(
    pattern: Run, run: Run, *, results: tuple[str, ...], slots: Mapping[str, Callable[[OfSelf | Global], bool]]
) -> Iterator[Match]:
    """All places in `run` where `pattern` stands, the first ones first; they may overlap.

    Args:
        pattern: a run whose names are slots and inputs.
        run: the run of a forward.
        results: the names of the pattern's results; only they are used outside.
        slots: for each slot a test of an attribute of self, or of a global.
    """
    if not pattern.kinds <= run.kinds:
        return
    last = Step(len(pattern.steps) - 1)
    for number, step in enumerate(run.steps):
        if step.kind[0] != pattern.steps[-1].kind[0]:
            continue
        found = _Matcher(pattern, run, slots)
        if found.same(last, Step(number)):
            match = found.finish(results)
            if match is not None:
                yield match


class _Matcher:
    """One attempt to lay a pattern over a run."""

    def __init__(self, pattern: Run, run: Run, slots: Mapping[str, Callable[[OfSelf | Global], bool]]) -> None:
        self.pattern, self.run, self.slots = pattern, run, slots
        self.bound: dict[str, Ref] = {}
        self.steps: dict[int, int] = {}
        self.reads: list[int] = []

    def same(self, pattern: Ref, ref: Ref) -> bool:
        if isinstance(pattern, Local):
            return self._bind(pattern.name, ref)
        if not isinstance(pattern, Step):
            return pattern == ref
        if not isinstance(ref, Step):
            return False
        if pattern.number in self.steps:
            return self.steps[pattern.number] == ref.number
        wanted = self.pattern.steps[pattern.number]
        found = _as_method(self.run.steps[ref.number], wanted.kind)
        if wanted.kind != found.kind or len(wanted.operands) != len(found.operands):
            return False
        kept = dict(self.bound), dict(self.steps)
        orders = [found.operands]
        if wanted.kind in _EITHER_ORDER:
            orders.append(found.operands[::-1])
        for operands in orders:
            self.bound, self.steps = dict(kept[0]), dict(kept[1])
            if all(self.same(one, other) for one, other in zip(wanted.operands, operands, strict=True)):
                self.steps[pattern.number] = ref.number
                return True
        self.bound, self.steps = kept
        return False

    def _bind(self, name: str, ref: Ref) -> bool:
        if name in self.slots and isinstance(ref, Step) and self.run.steps[ref.number].kind == ("read",):
            self.reads.append(ref.number)
            ref = self.run.steps[ref.number].operands[0]
        if name in self.bound:
            return self.bound[name] == ref
        if name in self.slots and not (isinstance(ref, (OfSelf, Global)) and self.slots[name](ref)):
            return False
        self.bound[name] = ref
        return True

    def finish(self, results: tuple[str, ...]) -> Match | None:
        """The match, if nothing else uses what is inside of it and nothing between its steps could change a tensor."""
        if set(self.steps) != set(range(len(self.pattern.steps))):
            return None
        steps = tuple(sorted(self.steps.values()))
        given = tuple(self.steps[ref.number] for ref in map(self.pattern.bound.get, results) if isinstance(ref, Step))
        hidden = set(steps) - set(given)
        if any(number in hidden for number in _used(self.run, outside=set(steps))):
            return None
        match = Match(self.bound, steps, given)
        if any(isinstance(ref, Step) and ref.number in steps for ref in self.bound.values()):
            return None
        # What is read before the match is read in the call.
        moved = range(min(_place(match), steps[0], *self.reads), steps[-1])
        if any(_may_change(self.run.steps[number]) for number in moved if number not in steps):
            return None
        return match


def _as_method(operation: Operation, kind: tuple[object, ...]) -> Operation:
    """A call of `self.weight.float` as the method `float` of `self.weight`, where `kind` is such a call."""
    called = operation.operands[0] if operation.operands else None
    if kind[0] == "call" and kind[1] is not None and isinstance(called, OfSelf):
        base, _, method = called.path.rpartition(".")
        if operation.kind[:2] == ("call", None) and method == kind[1] and base:
            return Operation(("call", method, *operation.kind[2:]), (OfSelf(base), *operation.operands[1:]))
    return operation


def _used(run: Run, *, outside: set[int]) -> Iterator[int]:
    for number, operation in enumerate(run.steps):
        if number not in outside:
            yield from (ref.number for ref in operation.operands if isinstance(ref, Step))
    yield from (ref.number for ref in (run.returned, *run.bound.values()) if isinstance(ref, Step))


# Note: [a value is read where it was read] The steps of a match need not follow each other, but one call takes their
# place:
#
#     h = self.up(x)              match
#     n = self.count(x)           between: it may write into x or into self.up.weight, or draw random numbers
#     y = self.down(relu(h))      match, and the call comes here: y = mlp(x, up=self.up, down=self.down)
#
# So steps of a match that come before the call run later than they did, and what they read must be the same then.
# There is no match if a step between may change something: any call may, except for methods that give views, sizes or
# other dtypes (_PURE). A call with one result comes in place of the match's last step. With several, the first may be
# used before the last, so it comes as soon as its inputs are there (_place), and the last steps run earlier than they
# did. An attribute that a child is given is read before the child's steps (`children.expanded`), which may change it,
# so it must be a step.
def _may_change(operation: Operation) -> bool:
    """Whether a step may write into a tensor, or draw random numbers."""
    kind = operation.kind
    return kind[0] == "written" or (kind[0] == "call" and kind[1] not in _PURE)


_PURE = frozenset({"chunk", "dim", "float", "reshape", "size", "to", "transpose", "type_as", "unsqueeze", "view"})


def _place(match: Match) -> int:
    """Before which step the call comes; see Note: [a value is read where it was read]."""
    if len(match.results) == 1:
        return match.steps[-1]
    return max((ref.number for ref in match.bound.values() if isinstance(ref, Step)), default=-1) + 1


def replaced(run: Run, match: Match, function: str, arguments: tuple[str, ...], by_name: tuple[str, ...]) -> Run:
    """Return the run with one call in place of a match.

    Args:
        run: it stays as it is.
        match: of this run.
        function: the global name of the function to call.
        arguments: names in `match.bound`, given in this order.
        by_name: names in `match.bound`, given by name.
    """
    kind = ("call", None, (False,) * len(arguments), by_name)
    operands = Global(None, function), *(match.bound[name] for name in (*arguments, *by_name))
    calls = [(Operation(kind, operands), match.results[0] if len(match.results) == 1 else None)]
    place = _place(match)
    if len(match.results) > 1:
        calls += [(Operation(("result", index), (_CALL,)), number) for index, number in enumerate(match.results)]
    order: list[tuple[Operation, int | None]] = []
    for number, operation in [*enumerate(run.steps), (len(run.steps), None)]:
        if number == place:
            order += calls
        if operation is not None and number not in match.steps:
            order.append((operation, number))
    new = {old: Step(index) for index, (_, old) in enumerate(order) if old is not None}
    call = Step(next(index for index, (operation, _) in enumerate(order) if operation is calls[0][0]))

    def moved(ref: Ref) -> Ref:
        if ref is _CALL:
            return call
        return new[ref.number] if isinstance(ref, Step) else ref

    return Run(
        [replace(operation, operands=tuple(map(moved, operation.operands))) for operation, _ in order],
        {name: moved(ref) for name, ref in run.bound.items()},
        None if run.returned is None else moved(run.returned),
    )


_CALL = Step(-1)
