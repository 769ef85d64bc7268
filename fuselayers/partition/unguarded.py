"""unguarded -- calls of a function itself, past Dynamo's guards, where all of its graphs run as they were traced.

The guards would be all that is left of the fusion then, and take longer than a small function. What such a call looks
like stands in for them: not all that they ask, but its answer never matters for the result, since what runs is the
function, which keeps for backward what eager keeps. Now and then they are asked, since what is not seen at a glance may
have become another graph, one that is fused.
"""

import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import NoneType
from typing import Any, Final

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.compiler import is_dynamo_compiling

from .._torch.dispatch import is_compiling, may_run_again, tangents_are_active
from .auto import Runs
from .fused_module import call_unfused, is_unfused

__all__ = ["UnguardedCalls", "glance"]

NO_BACKWARD = -1
current_backward = torch._C._current_graph_task_id
hooks_for_saved_tensors: Any = torch._C._autograd._top_saved_tensors_default_hooks
is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
_PLAIN_VALUES: Final = frozenset({NoneType, bool, int, float, str})
# Of calls that go past Dynamo; one with a number that differs each time is always another kind.
_MOST_KINDS_OF_CALLS: Final = 1024
_CALLS_WITHOUT_GUARDS: Final = 1000
# Of a function of which nothing is fused: in caches that hold something else a look at its arguments took as long as
# eight calls without one (80 us, on a Xeon of 2 GHz). How many go without is drawn anew each time, or a shape that
# comes in step with them would not be seen.
_FEWEST_CALLS_WITHOUT_A_LOOK: Final = 32
_MOST_CALLS_WITHOUT_A_LOOK: Final = 96
_order = random.Random(0)  # not the user's numbers
# Functions that are called to see whether others that are fused are called within: all of these say so then.
_watching: list[Any] = []


class UnguardedCalls:
    """What is called like the function in it: through `_call_compiled`, or past it.

    Attributes:
        fn: the function.
    """

    # So that they lie side by side. In the object's dict, among all that a wrapped function has, reading them took 4 us
    # of the 14 that an unfused call cost there.
    __slots__ = ("_as_it_is", "_calls_are_for_gradients", "_calls_without_a_look", "_has_fused_parts", "_runs", "fn")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self._runs = Runs()
        self._as_it_is: dict[Hashable, int] = {}
        self._calls_without_a_look = 0
        self._calls_are_for_gradients = True
        self._has_fused_parts = False

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # First and as little as can be, since an unfused call takes longer than the plain function by this.
        if (
            not is_dynamo_compiling()
            and not _watching
            and self._calls_without_a_look > 0
            and is_grad_enabled() is self._calls_are_for_gradients
            and hooks_for_saved_tensors(True) is None
            and is_fwd_grad_enabled()
            and current_backward() == NO_BACKWARD
        ):
            self._calls_without_a_look -= 1
            return self.fn(*args, **kwargs)
        # Inside another compiler the function is transparent: it is traced as if it had never been fused. Of tangents,
        # what is compiled knows nothing.
        if is_compiling() or is_unfused() or tangents_are_active():
            return self.fn(*args, **kwargs)
        # What ran compiled in forward shall when it runs again, where masks and saved tensors are compared or used.
        if self._runs.unfused == 0 or may_run_again():
            return self._call_compiled(args, kwargs)
        return self._call_as_it_is(args, kwargs)

    def _call_as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function itself where all graphs of a call like this one are fastest as they were traced.

        What is fused within the function is not fused by itself then, as it was not in the graph.
        """
        seen = glance(self.fn, args, kwargs)
        calls = self._as_it_is.get(seen, 0)
        if calls > 0:
            more = 0
            # In inference mode all calls are looked at: nothing tells there whether forward will run again.
            may_go_without = self._runs.open == 0 and not self._has_fused_parts and is_fwd_grad_enabled()
            if may_go_without:
                # No more than went before it, since a few small calls that warm something up say little of the next.
                drawn = _order.randint(_FEWEST_CALLS_WITHOUT_A_LOOK, _MOST_CALLS_WITHOUT_A_LOOK)
                more = min(drawn, _CALLS_WITHOUT_GUARDS - calls, calls - 1)
            self._calls_without_a_look, self._calls_are_for_gradients = more, is_grad_enabled()
            self._as_it_is[seen] = calls - 1 - more
            if calls == _CALLS_WITHOUT_GUARDS or self._has_fused_parts:
                _watching.append(self)
                try:
                    result, has_fused_parts = call_unfused(self.fn, args, kwargs)
                finally:
                    _watching.pop()
                self._has_fused_parts = self._has_fused_parts or has_fused_parts
                return result
            return self.fn(*args, **kwargs)
        fused, unfused = self._runs.fused, self._runs.unfused
        result = self._call_compiled(args, kwargs)
        if self._runs.fused == fused and self._runs.unfused > unfused:
            if len(self._as_it_is) >= _MOST_KINDS_OF_CALLS:
                self._as_it_is.clear()
            self._as_it_is[seen] = _CALLS_WITHOUT_GUARDS
        return result

    def _call_compiled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it through Dynamo and its guards, which compile what is new to them."""
        raise NotImplementedError

    def _look_again(self) -> None:
        """Let the next call be looked at: there is another graph."""
        self._calls_without_a_look = 0


def glance(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
    """Return what a call looks like, for the question whether it would run unfused.

    Calls that look alike may still differ, so the answer must not matter for the result.
    """
    # Each question costs a tenth of a microsecond, and three times that where the caches hold something else.
    seen = [torch.is_grad_enabled(), getattr(fn, "training", None), *kwargs]
    _add_looks(seen, args)
    _add_looks(seen, kwargs.values())
    return tuple(seen)


def _add_looks(seen: list[Any], values: Iterable[Any]) -> None:
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is nn.Parameter:
            seen += (value.shape, value.dtype, value.requires_grad)
        elif kind in _PLAIN_VALUES:
            seen += (kind, value)
        elif kind is list or kind is tuple:
            seen += (kind, len(value))
            _add_looks(seen, value)
        elif kind is dict:
            seen += (kind, *value)
            _add_looks(seen, value.values())
        else:
            # Which object it is, as the `self` of a method. What is new in each call is a new kind of call, too.
            seen += (kind, id(value), value.training if isinstance(value, nn.Module) else None)
