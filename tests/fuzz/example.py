"""An example is the text of a program: a model or function, its inputs, and the settings that it runs with."""

from __future__ import annotations

import inspect
import itertools
import re
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from fuselayers.partition import fuse
from tests.fuzz.harness import difference, run

IMPORTS: Final = """\
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fuselayers as fl
"""
# A gradient's error, as a share of its largest element, that compressed saves may cause.
_BITS_LOST: Final = {None: 0.0, "bfloat16": 0.25, "int8": 0.4, "float8": 0.5}
_RAISED: Final = "Traceback"
_numbers = itertools.count()


@dataclass(frozen=True)
class Example:
    """A program.

    Attributes:
        text: defines `make() -> model or function` and `inputs(rand, B) -> its arguments`.
        options: of `fuse`, those that are not the default.
        how: of `run`, those that are not the default.
    """

    text: str
    options: Mapping[str, Any] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)

    def program(self) -> str:
        """The text of a program that runs by itself and prints what is wrong."""
        how = "".join(f", {name}={value!r}" for name, value in self.how.items())
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return "\n\n\n".join(
            (
                f"{IMPORTS}\n{self.text}",
                inspect.getsource(run),
                f"{inspect.getsource(difference)}\n\n"
                f"plain = run(lambda call: call, make, inputs{how})\n"
                f"exact = run(lambda call: call, make, inputs{how}, wide=True)\n"
                f"fused = run(lambda call: fl.fuse(call{options}), make, inputs{how})\n"
                f"print(difference(fused, plain, exact, bits_lost={self._bits_lost}) or 'right')\n",
            )
        )

    @property
    def _bits_lost(self) -> float:
        return _BITS_LOST[self.options.get("compress")]

    def judge(self) -> tuple[str, str]:
        """Run it. Return a verdict and a reason.

        The verdicts: "right"; "wrong"; "torch": torch.compile gives wrong numbers as well; "torch raises": an error,
        and torch.compile fails too; "rejected": plain PyTorch cannot run it; "noise": right for other numbers; "unread
        draw": right with `torch_random`, which keeps unread draws.
        A budget that is refused becomes the one that the error names.
        """
        try:
            definitions = defined(self.text)
            make, inputs = definitions["make"], definitions["inputs"]
            plain = run(_as_is, make, inputs, **self.how)
            exact = run(_as_is, make, inputs, **self.how, wide=True)
        except Exception as error:
            return "rejected", f"{type(error).__name__}: {error}"
        if not all(value.isfinite().all() for value in (*plain.values(), *exact.values())):
            return "rejected", "not finite"

        def why(wrap: Callable[[Any], Any], how: Mapping[str, Any], plain: Any, exact: Any) -> str:
            torch.compiler.reset()
            try:
                results = run(wrap, make, inputs, **how)
            except Exception:
                return traceback.format_exc(limit=-3)
            return difference(results, plain, exact, bits_lost=self._bits_lost)

        def compiled(call: Any) -> Any:
            op_by_op = self.options.get("backend") == "eager"
            # Inductor's own random numbers are not those of eager.
            more = {"backend": "aot_eager"} if op_by_op else {"options": {"fallback_random": True}}
            return torch.compile(call, dynamic=self.options.get("dynamic"), **more)

        def fused(call: Any) -> Any:
            return fuse(call, **self.options)

        reason = why(fused, self.how, plain, exact)
        if not reason:
            return "right", ""
        refused = re.search(r"the smallest cut found saves ([\d,]+); give a larger budget", reason)
        if refused is not None:
            enough = f"budget:{refused[1].replace(',', '')}B"  # other graphs of the function may need more
            if enough == self.options["partition"]:
                return "wrong", reason
            return replace(self, options={**self.options, "partition": enough}).judge()
        with_draws = {**self.options, "torch_random": True}
        may_draw = with_draws != self.options and re.search("[Dd]ropout|rand_like|fl.build", self.text)
        if may_draw and not why(lambda call: fuse(call, **with_draws), self.how, plain, exact):
            return "unread draw", reason
        of_torch = why(compiled, self.how, plain, exact)
        if of_torch and reason.startswith(_RAISED):
            return "torch raises", reason
        if of_torch and not of_torch.startswith(_RAISED):
            return "torch", reason
        other = {**self.how, "seed": 1}
        if not why(fused, other, *(run(_as_is, make, inputs, **other, wide=wide) for wide in (False, True))):
            return "noise", reason
        return "wrong", reason


def _as_is(call: Any) -> Any:
    return call


def defined(text: str) -> dict[str, Any]:
    """Run the text of an example, and return its names."""
    # Dynamo looks for the module of a function, and tells functions apart by their file and line.
    sys.modules["fuzz_example"] = module = ModuleType("fuzz_example")
    exec(compile(IMPORTS + text, f"<example {next(_numbers)}>", "exec"), vars(module))
    return vars(module)


def settings(draw: st.DrawFn, *, is_random: bool, large: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Draw options of `fuse` and arguments of `run`.

    Args:
        draw: of hypothesis.
        is_random: whether torch's own random ops are called. The masks of eager PyTorch need `torch_random`. int8 draws
            one more seed before them.
        large: a size at which tensors are large enough to be compressed.
    """
    compressions = (None, None, None, "bfloat16", "float8", *(() if is_random else ("int8",)))
    options = {
        "backend": draw(st.sampled_from(("eager", "eager", "inductor"))),
        "partition": draw(st.sampled_from(("min_cut", "default", "budget:0.5", "budget:0.2"))),
        "compress": draw(st.sampled_from(compressions)),
        "dynamic": draw(st.sampled_from((None, True, False))),
        "torch_random": is_random,
    }
    how = {
        "dtype": draw(st.sampled_from((torch.float32, torch.float32, torch.float64, torch.bfloat16))),
        "sizes": draw(st.sampled_from(((2,), (3, 2)))) if options["compress"] is None else (large,),
        "incoming": draw(st.sampled_from(("dense", "sum", "transposed", "negative"))),
        "grad": draw(st.sampled_from((True, True, True, True, False))),
    }
    return _changed(options, fuse), _changed(how, run)


def _changed(chosen: Mapping[str, Any], function: Callable[..., Any]) -> dict[str, Any]:
    defaults = inspect.signature(function).parameters
    return {name: value for name, value in chosen.items() if value != defaults[name].default}


Line = tuple[str, int, int, int, bool]
"""A template, the places of the names that it reads, and whether later lines may read its result."""


def lines(draw: st.DrawFn, groups: tuple[tuple[str, ...], ...], *, most: int) -> list[Line]:
    """Draw lines, with templates of each group as often."""
    place = st.sampled_from((0, 0, 0, 0, 1, 1, 2, 3, 5))  # mostly the newest, so that few lines are for nothing
    is_read = st.sampled_from((True,) * 7 + (False,))
    line = st.tuples(st.sampled_from(groups).flatmap(st.sampled_from), place, place, place, is_read)
    return draw(st.lists(line, min_size=draw(st.integers(1, most // 2)), max_size=most))


def statements(lines: Sequence[Line], names: list[str], values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return lines of code that make layers, and lines that call them. Each runs here; one that raises is left out.

    Args:
        lines: a template is an expression of {a}, {b} and {c}, which gets a new name; or, after "!", a statement
            without a result. After "layer |" it may use that layer as {f}, and the one before as {last}.
        names: of the tensors that lines may read; the new ones are added.
        values: what the names stand for.
    """
    layers: list[str] = []
    calls: list[str] = []
    for template, *places, is_read in lines:
        layer, _, call = template.rpartition(" | ")
        chosen = {key: names[-1 - at % len(names)] for key, at in zip("abc", places, strict=True)}
        new, made, last = f"t{len(calls)}", f"self.f{len(layers)}", f"self.f{max(len(layers) - 1, 0)}"
        layer = f"{made} = {layer}" if layer else ""
        call = call.format(f=made, last=last, **chosen)
        call = call[1:] if call.startswith("!") else f"{new} = {call}"
        try:
            exec(f"{layer}\n{call}", values)
            is_moderate = new not in values or bool((values[new].detach().abs() < 100).all())
        except Exception:
            continue
        if not is_moderate:
            continue
        names += [new] if new in values and is_read else []
        calls.append(call)
        layers += [layer] if layer else []
    return layers, calls


def body(
    draw: st.DrawFn, inputs: tuple[str, ...], groups: tuple[tuple[str, ...], ...], *, most_inputs: int, most: int
) -> tuple[list[str], list[str], list[str], list[str]]:
    """Draw a program's inputs and lines.

    Returns:
        The lines that make inputs; the names of inputs and results; the lines that make layers; those that call.
    """
    made = tensors(draw, inputs, most=most_inputs)
    names = [line.split()[0] for line in made]
    values = names_of_program()
    exec("\n".join(made), values)
    return made, names, *statements(lines(draw, groups, most=most), names, values)


def outputs(draw: st.DrawFn, names: list[str]) -> str:
    """Draw what a function returns: the last tensor, and up to two others."""
    others = draw(st.lists(st.sampled_from(names), max_size=2))
    return ", ".join((names[-1], *others))


def tensors(draw: st.DrawFn, kinds: tuple[str, ...], *, most: int) -> list[str]:
    """Draw lines that make inputs x0, x1, ... by `rand` and B. A kind may use {a}, an input before it."""
    lines: list[str] = []
    for kind, place in draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 7)), min_size=1, max_size=most)):
        earlier = f"x{place % len(lines)}" if lines else kinds[0]
        lines.append(f"x{len(lines)} = {kind.format(a=earlier)}")
    return lines


class Counts:
    """The verdicts so far, and the shortest program of each verdict that needs a reader.

    Args:
        failing: the verdicts of which `check` raises.
    """

    def __init__(self, failing: tuple[str, ...] = ("wrong",)) -> None:
        self._failing = failing
        self.verdicts: Counter[str] = Counter()
        self._known: dict[str, tuple[str, str]] = {}  # hypothesis draws a program several times while it shrinks it
        self.shortest: dict[str, tuple[Example, str]] = {}

    def check(self, example: Example) -> None:
        """Judge an example; raise AssertionError with its program if it fails."""
        program = example.program()
        if program not in self._known:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict, reason = self._known[program] = example.judge()
            self.add(verdict, example, reason)
        verdict, reason = self._known[program]
        assert verdict not in self._failing, f"{reason}\n\n{program}"

    def add(self, verdict: str, example: Example, reason: str) -> None:
        """Count an example."""
        self.verdicts[verdict] += 1
        shortest = self.shortest.get(verdict)
        to_read = verdict in ("torch", "torch raises", "noise", "slow")
        if to_read and (shortest is None or len(example.text) < len(shortest[0].text)):
            self.shortest[verdict] = example, reason

    def check_quickly(self, example: Example) -> None:
        """Check an example with its settings, op by op."""
        self.check(replace(example, options={**example.options, "backend": "eager"}))

    def check_by_default(self, example: Example) -> None:
        """Check an example with default arguments; torch's own random ops need `torch_random`."""
        kept = {name: value for name, value in example.options.items() if name == "torch_random"}
        self.check(replace(example, options=kept))


def names_of_program() -> dict[str, Any]:
    """The names that the lines of a program use while they are drawn."""

    def rand(*shape: int, grad: bool = True) -> Tensor:
        return torch.randn(shape, requires_grad=grad) * 1

    torch.manual_seed(0)  # the same draws give the same program
    names: dict[str, Any] = {"rand": rand, "B": 2, "self": nn.Module()}
    exec(IMPORTS, names)
    return names
