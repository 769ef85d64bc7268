"""writer -- writes down as straight-line Python what a call of an op does. Used by replay.

It stands where torch dispatches, and notes each call of torch's ops, and each launch of a kernel (see launch). A
`torch.autograd.Function` becomes another one, whose forward and backward are written down too (see apply).

What it does not know it does not write down: a value that is no tensor, number, string, dtype or the like, a tensor
that comes from elsewhere, an op that autograd records.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..._torch.dispatch import TorchDispatchMode, empty_strided_on

__all__ = ["Saving", "Writer", "apply", "not_written", "writer", "writing"]

_aten: Final = torch.ops.aten
# What makes a tensor that nobody has written to; its size and strides are read off the result.
_EMPTY: Final = frozenset(
    {
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.empty_strided.default,
        _aten.new_empty.default,
        _aten.new_empty_strided.default,
    }
)
# Of dtypes, which are looked at before a call is known.
_ASKING: Final = frozenset({_aten.promote_types.default})
_LITERALS: Final = frozenset({type(None), bool, int, str})
_CONSTANTS: Final = frozenset({float, torch.dtype, torch.device, torch.layout, torch.memory_format})

_here = threading.local()


def writer() -> "Writer | None":
    """Return what writes down the calls of this thread, if anything does."""
    return getattr(_here, "writer", None)


@contextmanager
def writing(wrote: "Writer") -> Iterator[None]:
    """Write down what is called inside the block."""
    _here.writer = wrote
    try:
        with wrote:
            yield
    finally:
        _here.writer = None


def not_written(why: str) -> None:
    """Stop what writes down the calls of this thread, if anything does."""
    wrote = None if torch.compiler.is_dynamo_compiling() else writer()
    if wrote is not None:
        wrote.stop(why)


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return `function.apply(*arguments)`, so that it can be written down. Used by every op that brings its gradients.

    Its backward reads of its context what forward left there, `saved_tensors` and `needs_input_grad`.
    """
    wrote = None if torch.compiler.is_dynamo_compiling() else writer()
    return function.apply(*arguments) if wrote is None else wrote.apply(function, arguments)  # type: ignore[no-untyped-call]


class Saving(NamedTuple):
    """What the forward of a `torch.autograd.Function` does, written down.

    Attributes:
        name: of the original.
        original_backward: its backward. Dynamo would not let it be reached through the function.
        forward: takes tensors, and returns the results and what is saved for backward.
        places: for each of its parameters the original's argument that it is, or None for a tensor that was none.
        num_arguments: of the original.
        left: what it leaves on its context besides tensors, by name.
        materialize: whether a gradient that does not come is to be zeros.
    """

    name: str
    original_backward: Callable[..., Any]
    forward: Callable[..., Any]
    places: list[int | None]
    num_arguments: int
    left: dict[str, Any]
    materialize: bool

    def backward(self, saved: Sequence[Tensor | None], wants: Sequence[bool], incoming: Sequence[Any]) -> Any:
        """Run the original's backward, and return a gradient for each parameter.

        Args:
            saved: the tensors that were.
            wants: which of the parameters need one.
            incoming: the gradients of the results.
        """
        wanted = [False] * self.num_arguments
        for place, want in zip(self.places, wants, strict=True):
            if place is not None:
                wanted[place] = want
        found = self.original_backward(_Left(saved, tuple(wanted), self.left), *incoming)
        found = found if isinstance(found, tuple) else (found,)
        return tuple([None if place is None else found[place] for place in self.places])


class _NotWrittenError(Exception):
    """Something cannot be written down."""


class _Line(NamedTuple):
    text: str
    reads: set[str]
    makes: set[str] | None = None  # what nobody misses who reads none of it; None for a line that does something


class Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is called within it.

    Args:
        tensors: of the call, each another object; None for one that is not there.
        remade: makes of an autograd function that was written down what calls it; None where there may be none.

    Attributes:
        why_not: why this cannot be written down, None as long as it can.
        has_function: whether an autograd function was called.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], remade: Callable[[Saving], Callable[..., Any]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.why_not: str | None = None
        self.has_function = False
        self._applying = False
        self._remade = remade
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no other object gets the id of one of them
        self._looks: dict[str, tuple[Any, ...]] = {}
        self._whole: dict[str, tuple[str, int]] = {}  # of a view the tensor that it is one of, and the offset in bytes
        self._learn: set[str] = set()
        self._constants: dict[str, Any] = {}
        self._lines: list[_Line] = []
        self._forward: tuple[Any, _Context] | None = None
        self._parameters = [f"a{place}" for place in range(len(tensors))]
        for one, name in zip(tensors, self._parameters, strict=True):
            if one is not None:
                self._name(one, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # What autograd calls to keep a function's results, once its forward is done, is its own.
        if self._forward is None:
            self._write(self._write_call, func, args, kwargs, out)
        return out

    def launched(self, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Write down a launch.

        Args:
            start: launches the compiled kernel.
            arguments: of the kernel, its constants too.
        """
        self._write(self._write_launch, start, arguments)

    def apply(self, function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
        """Run an autograd function, and write it down as one line."""
        if self.why_not is not None or self._remade is None or self._applying:
            self.stop(f"{function.__name__} is applied within another, or in a backward")
            return function.apply(*arguments)  # type: ignore[no-untyped-call]
        self.has_function = self._applying = True
        before, self._lines = self._lines, []
        outside = set(self._looks)

        # Autograd's graph keeps this class as long as the results live: it may hold neither them nor the writer.
        def forward(ctx: Any, *given: Any) -> Any:
            wrote = writer()
            assert wrote is not None
            context = _Context(ctx)
            results = function.forward(context, *given)
            wrote._forward = results, context
            return results

        out = type(function.__name__, (function,), {"forward": staticmethod(forward)}).apply(*arguments)  # type: ignore[attr-defined]
        assert self._forward is not None
        results, context = self._forward
        inside, self._lines, self._forward, self._applying = self._lines, before, None, False
        self._write(self._write_apply, function, arguments, inside, context, results, outside, out)
        return out

    def stop(self, why: str) -> None:
        """Write no more, and keep nothing alive: this cannot be written down."""
        self.why_not = self.why_not or why
        self._names.clear()
        self._kept.clear()

    def replay(self, results: Any) -> Callable[..., Any] | None:
        """Return what was written as a function of the tensors that returns `results`; None if it cannot be."""
        if self.why_not is None:
            try:
                return self._made(self._parameters, self._body(self._lines, results)[0])
            except _NotWrittenError as error:
                self.stop(str(error))
        return None

    def _write(self, write: Callable[..., None], *arguments: Any) -> None:
        if self.why_not is None:
            try:
                write(*arguments)
            except _NotWrittenError as error:
                self.stop(str(error))

    def _body(self, lines: list[_Line], results: Any) -> tuple[list[str], set[str]]:
        """Of all lines those that results need, or that do something; and the names that they read."""
        needed: set[str] = set()
        body = [f"return {self._word(results, needed, itself=True)}"]
        for line in reversed(lines):
            if line.makes is None or line.makes & needed:
                needed |= line.reads
                body.append(line.text)
        return body[::-1], needed

    def _made(self, parameters: Sequence[str], body: Sequence[str]) -> Callable[..., Any]:
        source = "\n    ".join([f"def replay({', '.join(parameters)}):", *body])
        exec(compile(source, "<written down by fuselayers.ops.forms.writer>", "exec"), self._constants)
        replay: Callable[..., Any] = self._constants.pop("replay")
        replay.__doc__ = source
        return replay

    def _write_launch(self, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        reads: set[str] = set()
        words = [(self._pointer if isinstance(one, Tensor) else self._word)(one, reads) for one in arguments]
        self._lines.append(_Line(f"{self._constant(start)}({', '.join(words)})", reads))

    def _write_apply(
        self,
        function: type[torch.autograd.Function],
        arguments: tuple[Any, ...],
        inside: list[_Line],
        context: "_Context",
        results: Any,
        outside: set[str],
        out: Any,
    ) -> None:
        strange = context.strange or next((name for name, one in context.left.items() if not _is_constant(one)), None)
        if strange is not None:
            raise _NotWrittenError(f"{function.__name__} uses its context's {strange}")
        body, reads = self._body(inside, (results, context.saved))
        places: dict[str, int | None] = dict.fromkeys(sorted(reads & outside))
        for place, one in enumerate(arguments):
            if isinstance(one, Tensor):
                name = self._word(one, set())
                if one.requires_grad and places.get(name) is not None:
                    raise _NotWrittenError(f"{function.__name__} gets a tensor twice")
                if one.requires_grad or name in places:
                    places[name] = place
        if any(place is None and name in self._learn for name, place in places.items()):
            raise _NotWrittenError(f"{function.__name__} reads a tensor that learns, and is no argument")
        assert self._remade is not None
        saving = Saving(
            name=function.__name__,
            original_backward=function.backward,
            forward=self._made(tuple(places), body),
            places=list(places.values()),
            num_arguments=len(arguments),
            left=context.left,
            materialize=context.materialize,
        )
        made, call = self._word(results, set(), itself=True), self._constant(self._remade(saving))
        self._lines.append(_Line(f"{made} = {call}({', '.join(places)})", set(places)))
        # As a rule autograd returns the same objects.
        for one, same in zip(tree_leaves(out), tree_leaves(results), strict=True):
            name = self._names[id(one)] = self._names[id(same)]
            self._kept.append(one)
            if one.requires_grad:
                self._learn.add(name)

    def _write_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if func in _ASKING:
            return
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if not outs or not all(isinstance(one, Tensor) for one in outs):
            raise _NotWrittenError(f"{func} returns no tensors")
        if torch.is_grad_enabled() and any(
            isinstance(one, Tensor) and one.requires_grad for one in tree_leaves((args, kwargs))
        ):
            raise _NotWrittenError(f"autograd records {func}")
        reads: set[str] = set()
        if func in _EMPTY:
            name = self._new_name(out)
            empty = self._constant(empty_strided_on(out.device.type))
            text = f"{name} = {empty}({tuple(out.shape)}, {tuple(out.stride())}, {self._constant(out.dtype)})"
            self._lines.append(_Line(text, reads, {name}))
            return
        words = [self._word(one, reads) for one in args]
        words += [f"{key}={self._word(one, reads)}" for key, one in kwargs.items()]
        call = f"{self._constant(func)}({', '.join(words)})"
        if id(out) in self._names:  # written in place
            self._lines.append(_Line(call, reads))
            return
        names = [self._new_name(one) for one in outs]
        source = args[0] if args and isinstance(args[0], Tensor) and not func._schema.is_mutable else None
        are_views = source is not None
        for one, name in zip(outs, names, strict=True):
            if source is None or one.untyped_storage()._cdata != source.untyped_storage()._cdata:
                are_views = False
                continue
            whole, offset = self._whole.get(self._names[id(source)], (self._names[id(source)], 0))
            self._whole[name] = whole, offset + one.data_ptr() - source.data_ptr()
        made = "".join(f"{name}, " for name in names) if isinstance(out, (tuple, list)) else names[0]
        self._lines.append(_Line(f"{made} = {call}", reads, set(names) if are_views else None))

    def _pointer(self, tensor: Tensor, reads: set[str]) -> str:
        """A tensor that a kernel gets: of a view that begins where its whole begins, the whole."""
        name = self._word(tensor, reads)
        whole, offset = self._whole.get(name, (name, 0))
        if whole != name and offset == 0 and self._looks[whole][0] == tensor.dtype:
            reads.discard(name)
            reads.add(whole)
            return whole
        return name

    def _word(self, value: Any, reads: set[str], *, itself: bool = False) -> str:
        """A value in the text; of a view that looks like its whole the whole, but `itself` of a caller's tensor."""
        if isinstance(value, Tensor):
            name = self._names.get(id(value))
            if name is None:
                raise _NotWrittenError("a tensor comes from elsewhere")
            whole, _ = self._whole.get(name, (name, 0))
            if not (itself and whole in self._parameters) and self._looks[whole] == _look(value):
                name = whole
            reads.add(name)
            return name
        kind = type(value)
        if kind is tuple:
            return f"({''.join(f'{self._word(one, reads, itself=itself)}, ' for one in value)})"
        if kind in (list, torch.Size):
            return f"[{', '.join(self._word(one, reads, itself=itself) for one in value)}]"
        if kind in _LITERALS:
            return repr(value)
        if kind in _CONSTANTS:
            return self._constant(value)
        raise _NotWrittenError(f"a {kind.__name__} may be another one in the next call")

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _new_name(self, tensor: Tensor) -> str:
        name = f"t{len(self._kept)}"
        self._name(tensor, name)
        return name

    def _name(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = name
        self._kept.append(tensor)
        self._looks[name] = _look(tensor)
        if tensor.requires_grad:
            self._learn.add(name)


class _Left:
    """What an autograd function's backward gets for its context."""

    def __init__(self, saved: Sequence[Tensor | None], wanted: tuple[bool, ...], left: dict[str, Any]) -> None:
        self.saved_tensors = saved
        self.needs_input_grad = wanted
        for name, value in left.items():
            setattr(self, name, value)


class _Context:
    """What an autograd function's forward gets: the real one, and what was asked of it."""

    def __init__(self, ctx: Any) -> None:
        self.__dict__.update(_ctx=ctx, left={}, saved=(), materialize=True, strange=None)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.__dict__["saved"] = tensors
        self._ctx.save_for_backward(*tensors)

    def set_materialize_grads(self, value: bool) -> None:
        self.__dict__["materialize"] = value
        self._ctx.set_materialize_grads(value)

    def __getattr__(self, name: str) -> Any:
        if name not in self.left and name != "needs_input_grad":
            self.__dict__["strange"] = name
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.left[name] = value
        setattr(self._ctx, name, value)


def _is_constant(value: Any) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_constant, value))
    return type(value) in _LITERALS or type(value) in _CONSTANTS


def _look(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()
