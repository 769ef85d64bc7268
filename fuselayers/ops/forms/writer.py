"""writer -- writes down as straight-line Python what a call of an op does. Used by replay.

It stands where torch dispatches, and notes each call of torch's ops, and each launch of a kernel (see launch). A
`torch.autograd.Function` becomes another one, whose forward and backward are written down too (see apply).
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ...partition.torch_private import TorchDispatchMode, empty_strided_on

__all__ = ["Saving", "Writer", "apply", "writer", "writing"]

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


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Any:
    """Return `function.apply(*arguments)`, so that it can be written down. Used by every op that brings its gradients.

    Its backward reads of its context what forward left there, `saved_tensors` and `needs_input_grad`.
    """
    wrote = None if torch.compiler.is_dynamo_compiling() else writer()
    return function.apply(*arguments) if wrote is None else wrote.apply(function, arguments)  # type: ignore[no-untyped-call]


class _NotWrittenError(Exception):
    """Something cannot be written down."""


class _Line(NamedTuple):
    text: str
    reads: set[str]
    makes: set[str] | None = None  # what nobody misses who reads none of it; None for a line that does something


class Saving(NamedTuple):
    """What the forward of a `torch.autograd.Function` does, written down.

    Attributes:
        name: of the original.
        original_backward: its backward. Dynamo would not let it be reached through the function.
        work: takes tensors, and returns the results and what is saved for backward.
        places: for each of its parameters the original's argument that it is, or None for a tensor that was none.
        num_arguments: of the original.
        left: what it leaves on its context besides tensors, by name.
        materialize: whether a gradient that does not come is to be zeros.
    """

    name: str
    original_backward: Callable[..., Any]
    work: Callable[..., Any]
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


class Writer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what is called within it.

    Args:
        tensors: of the call, each another object; None for one that is not there.
        applied: makes of an autograd function that was written down what calls it.
    """

    def __init__(
        self, tensors: Sequence[Tensor | None], applied: Callable[[Saving], Callable[..., Any]] | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._applied = applied
        self._names: dict[int, str] = {}
        self._kept: list[Tensor] = []  # so that no other object gets the id of one of them
        self._looks: dict[str, tuple[Any, ...]] = {}
        self._whole: dict[str, tuple[str, int]] = {}  # of a view the tensor that it is one of, and the offset in bytes
        self._constants: dict[str, Any] = {}
        self._lines: list[_Line] = []
        self._obstacle: str | None = None
        self.applies = self._launches = self._saves = False
        self._parameters = [f"a{place}" for place in range(len(tensors))]
        for one, name in zip(tensors, self._parameters, strict=True):
            if one is not None:
                self._name(one, name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._saves:
            with self._noting():
                self._write_call(func, args, kwargs, out)
        return out

    @property
    def only_calls_torch(self) -> bool:
        """Whether ops of torch were called, and no kernel was launched."""
        return bool(self._lines) and not self._launches

    def launched(self, start: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Write down a launch.

        Args:
            start: launches the compiled kernel.
            arguments: of the kernel, its constants too.
        """
        self._launches = True
        with self._noting():
            reads: set[str] = set()
            words = [(self._pointer if isinstance(one, Tensor) else self._word)(one, reads) for one in arguments]
            self._lines.append(_Line(f"{self._constant(start)}({', '.join(words)})", reads))

    def apply(self, function: type[torch.autograd.Function], arguments: tuple[Any, ...]) -> Any:
        """Run an autograd function, and write it down as one line."""
        self.applies = True
        before, self._lines = self._lines, []
        outside = set(self._looks)
        noted: list[tuple[Any, _Context]] = []

        def forward(ctx: Any, *given: Any) -> Any:
            context = _Context(ctx)
            noted.append((function.forward(context, *given), context))
            self._saves = True  # what autograd calls to keep the results is its own
            return noted[0][0]

        noting = type(function.__name__, (function,), {"forward": staticmethod(forward)})
        out = noting.apply(*arguments)  # type: ignore[attr-defined]
        inside, self._lines, self._saves = self._lines, before, False
        with self._noting():
            made, context = noted[0]
            self._write_apply(function, arguments, inside, context, made, outside)
            for one, same in zip(tree_leaves(out), tree_leaves(made), strict=True):
                self._names[id(one)] = self._names[id(same)]
                self._kept.append(one)
        return out

    def function(self, results: Any) -> Callable[..., Any] | None:
        """Return what was written as a function of the tensors that returns `results`; None if it cannot be."""
        with self._noting():
            body, _ = self._body(self._lines, results)
            return None if self._obstacle is not None else self._made(self._parameters, body)
        return None

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except _NotWrittenError as obstacle:
            self._obstacle = str(obstacle)

    def _body(self, lines: list[_Line], results: Any) -> tuple[list[str], set[str]]:
        """Of all lines those that results need, or that do something; and the names that they read."""
        needed: set[str] = set()
        body = [f"return {self._word(results, needed)}"]
        for line in reversed(lines):
            if line.makes is None or line.makes & needed:
                needed |= line.reads
                body.append(line.text)
        return body[::-1], needed

    def _made(self, parameters: Sequence[str], body: Sequence[str]) -> Callable[..., Any]:
        source = "\n    ".join([f"def replay({', '.join(parameters)}):", *body])
        exec(source, self._constants)
        replay: Callable[..., Any] = self._constants.pop("replay")
        replay.__doc__ = source
        return replay

    def _write_apply(
        self,
        function: type[torch.autograd.Function],
        arguments: tuple[Any, ...],
        inside: list[_Line],
        context: "_Context",
        out: Any,
        outside: set[str],
    ) -> None:
        keeps_tensors = any(isinstance(one, Tensor) for one in tree_leaves(context.left))
        if self._applied is None or context.unknown or keeps_tensors:
            raise _NotWrittenError(f"{function.__name__} stands within another, or does more with its context")
        body, reads = self._body(inside, (out, context.saved))
        places: dict[str, int | None] = dict.fromkeys(sorted(reads & outside))
        for place, one in enumerate(arguments):
            if isinstance(one, Tensor):
                name = self._word(one, set())
                if one.requires_grad and places.get(name) is not None:
                    raise _NotWrittenError(f"{function.__name__} gets a tensor twice")
                if one.requires_grad or name in places:
                    places[name] = place
        work = self._made(tuple(places), body)
        saving = Saving(
            function.__name__,
            function.backward,
            work,
            list(places.values()),
            len(arguments),
            context.left,
            context.materialize,
        )
        made, call = self._word(out, set()), self._constant(self._applied(saving))
        self._lines.append(_Line(f"{made} = {call}({', '.join(places)})", set(places)))

    def _write_call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        if not any(isinstance(one, Tensor) for one in (*args, *outs)) and not kwargs:
            return  # of dtypes, which are options
        if not all(isinstance(one, Tensor) for one in outs):
            raise _NotWrittenError(f"{func} returns no tensors")
        if torch.is_grad_enabled() and any(isinstance(one, Tensor) and one.requires_grad for one in tree_leaves(args)):
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

    def _word(self, value: Any, reads: set[str]) -> str:
        if isinstance(value, Tensor):
            name = self._names.get(id(value))
            if name is None:
                raise _NotWrittenError("a tensor comes from elsewhere")
            whole, _ = self._whole.get(name, (name, 0))
            if self._looks[whole] == _look(value):
                name = whole
            reads.add(name)
            return name
        if isinstance(value, tuple):
            return f"({''.join(f'{self._word(one, reads)}, ' for one in value)})"
        if isinstance(value, list):
            return f"[{', '.join(self._word(one, reads) for one in value)}]"
        return repr(value) if value is None or type(value) in (bool, int, str) else self._constant(value)

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
        self.__dict__.update(_ctx=ctx, left={}, saved=(), materialize=True, unknown=None)

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.__dict__["saved"] = tensors
        self._ctx.save_for_backward(*tensors)

    def set_materialize_grads(self, value: bool) -> None:
        self.__dict__["materialize"] = value
        self._ctx.set_materialize_grads(value)

    def __getattr__(self, name: str) -> Any:
        if name not in self.left and name != "needs_input_grad":
            self.__dict__["unknown"] = name
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.left[name] = value
        setattr(self._ctx, name, value)


def _look(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr()
