"""served -- on a CPU: which form served a call, called at once for each call like it.

A call of an op checks its arguments, and asks which form serves it (see choice). Both follow from the layouts of the
tensors, from the options, from whether autograd records and from the number of threads; where that is the compiled form
also from what it may not serve under. So where the answer is final, it is kept with the form, and for calls like this
one nothing is left but to see that they are:

    lambda options, a0, a1, a2: (
        form(a0, None, None, a1, a2, None, None, *form_options)[0]
        if options[0].__class__ is float and options[1].__class__ is str and alike(a0, a1, a2)
        and is_grad_enabled() is True and get_num_threads() == 2
        else OTHERWISE
    )

It matters where an op is one kernel of torch's, with nothing to gain but all of the call to lose: `layer_norm` of 4x16
float32 takes 8 us in a loop, and 45 after ops that went through the caches, where `F.layer_norm` takes 5 and 42 (two
cores of a Xeon).
"""

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..._torch.dispatch import is_any_autocast_enabled, is_watched
from .alike import like_these, put_first

__all__ = ["OTHERWISE", "Served", "forget_served", "serve_and_keep"]

OTHERWISE: Final = object()
"""What a kept form returns for a call that it does not serve."""


class _Came(NamedTuple):
    """A form that was called, and will serve every call like this one, as long as `may` says yes."""

    form: Callable[..., Any]
    tensors: Sequence[Tensor | None]
    options: tuple[Any, ...]
    may: Callable[[], bool] | None
    results: Any


_here = threading.local()


def serve_and_keep(
    form: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    options: tuple[Any, ...],
    *,
    may: Callable[[], bool] | None = None,
) -> Any:
    """Call a form that will serve every call like this one, and tell the call that leads here. Used by choice.

    Args:
        form: takes the tensors and the options.
        tensors: of the form.
        options: likewise.
        may: says whether it may serve, here and now; None where it always may.
    """
    results = form(*tensors, *options)
    came: list[_Came] | None = getattr(_here, "came", None)
    if came is not None:
        came.append(_Came(form, tensors, options, may, results))
    return results


class Served:
    """The kept forms of one op.

    Attributes:
        known: by the shape of a call's first tensor and by its options, functions of the options and the tensors, each
            of which serves the call or returns OTHERWISE.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[Any, ...], tuple[Callable[..., Any], ...]] = {}
        with _lock:
            _all.add(self)

    def anew(self, call: Callable[..., Any], tensors: Sequence[Tensor | None], options: tuple[Any, ...]) -> Any:
        """Return what a call of the op makes of the tensors and the options; keep what served it, if that is final.

        Args:
            call: takes the tensors and the options, one after the other.
            tensors: of the call, the first of which is there.
            options: likewise; they are hashable.
        """
        before, came = getattr(_here, "came", None), list[_Came]()
        _here.came = came
        try:
            results = call(*tensors, *options)
        finally:
            _here.came = before
        serve = _kept(tensors, options, results, came[0]) if len(came) == 1 else None
        if serve is not None:
            assert tensors[0] is not None
            with _lock:
                put_first(self.known, (tensors[0].shape, options), serve)
        return results


_all: "weakref.WeakSet[Served]" = weakref.WeakSet()
_lock = threading.Lock()


def forget_served() -> None:
    """Let every call of every op ask again which form serves it. Used by choice."""
    with _lock:
        for one in _all:
            one.known.clear()


def _kept(
    tensors: Sequence[Tensor | None], options: tuple[Any, ...], results: Any, came: _Came
) -> Callable[..., Any] | None:
    """What serves calls like this one; None if nothing does."""
    # What watches may make numbers tensors, and of autocast the guard sees that it is on, and not its dtype.
    if is_watched() or is_any_autocast_enabled() or any(isinstance(one, Tensor) for one in options):
        return None
    # A form that gets the call's own tensors, and whose result is the call's, is all that the call does.
    places: list[int | None] = []
    for one in came.tensors:
        place = next((place for place, other in enumerate(tensors) if one is not None and one is other), None)
        if one is not None and place is None:
            return None
        places.append(place)
    item = None
    if results is not came.results:
        items = came.results if type(came.results) is tuple else ()
        item = next((item for item, one in enumerate(items) if one is results), None)
        if item is None:
            return None
    alike = like_these([one for one in tensors if one is not None])
    if alike is None:
        return None
    server = _server(
        tuple(one is not None for one in tensors),
        tuple(map(type, options)),
        tuple(places),
        item,
        came.may is not None,
    )
    now = torch.is_grad_enabled(), torch.get_num_threads()
    serve: Callable[..., Any] = server(alike, *now, came.form, came.options, came.may)
    return serve


@functools.lru_cache(maxsize=512)
def _server(
    present: tuple[bool, ...],
    kinds: tuple[type, ...],
    places: tuple[int | None, ...],
    item: int | None,
    sometimes: bool,
) -> Callable[..., Callable[..., Any]]:
    """What makes such a function.

    Args:
        present: whether each of the call's tensors is there.
        kinds: the classes of its options.
        places: where each of the form's tensors is among the call's; None for one that is absent.
        item: which of the form's results the call returns; None for all of them.
        sometimes: whether something has to say that the form may serve.
    """
    names = [f"a{place}" for place in range(len(present))]
    # 1, 1.0 and True are equal, and an op may take one of them alone.
    conditions = [f"options[{place}].__class__ is kind{place}" for place in range(len(kinds))]
    conditions += [f"{name} is None" for name, there in zip(names, present, strict=True) if not there]
    conditions.append(f"alike({', '.join(name for name, there in zip(names, present, strict=True) if there)})")
    conditions += ["is_grad_enabled() is grad", "get_num_threads() == threads", *(["may()"] if sometimes else [])]
    given = ", ".join("None" if place is None else names[place] for place in places)
    result = f"form({given}, *form_options)" + ("" if item is None else f"[{item}]")
    serve = f"lambda options, {', '.join(names)}: {result} if {' and '.join(conditions)} else OTHERWISE"
    server: Callable[..., Callable[..., Any]] = eval(
        f"lambda alike, grad, threads, form, form_options, may: {serve}",
        {
            "is_grad_enabled": torch.is_grad_enabled,
            "get_num_threads": torch.get_num_threads,
            "OTHERWISE": OTHERWISE,
            **{f"kind{place}": kind for place, kind in enumerate(kinds)},
        },
    )
    return server
