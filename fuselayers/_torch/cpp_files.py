"""cpp_files -- compile Inductor's CPU kernels as one C++ file per graph, forward and backward at the same time.

By default Inductor compiles one file per kernel. Reading torch's headers takes 2.2 of the 2.4 s of a file, and a
transformer block has 13 kernels.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
_INCLUDE = re.compile(r"^#include .*\n", re.MULTILINE)


class _Kernel:
    """A kernel that is being compiled; a call waits for it."""

    def __init__(self, argument_types: list[str], source: str) -> None:
        self.argument_types, self.source = argument_types, source
        self.loaded: Callable[[], Callable[..., Any]]  # set by `_compile`

    def __call__(self, *arguments: Any) -> None:
        self.loaded()(*arguments)


@contextlib.contextmanager
def cpp_files() -> Iterator[None]:
    """Inside this context, Inductor compiles the kernels of a graph as one file, in the background.

    On exit all kernels are ready. Inductor also skips its test builds for vector instructions, which take 6 s on
    AVX-512. A compiler that can read torch's headers, in C++20, supports all vector instructions but some of AMX, which
    are still tested.

    Raises:
        RuntimeError: on exit, if the compiler fails.
    """
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads
    from torch._inductor.cpu_vec_isa import VecISA

    waiting: list[tuple[dict[str, Any], str, _Kernel]] = []

    def cpp_pybinding(self: Any, argtypes: list[str], source_code: str) -> _Kernel:
        return _Kernel(argtypes, source_code)

    wait_for_others, try_out = AsyncCompile.wait, VecISA.check_build

    def wait(self: Any, scope: dict[str, Any]) -> None:
        kernels = {name: value for name, value in scope.items() if isinstance(value, _Kernel)}
        if kernels:
            # With one thread `submit` would run the task at once, and the task would wait for a lock that we hold.
            _compile(list(kernels.values()), self.submit if get_compile_threads() > 1 else None)
        waiting.extend((scope, name, kernel) for name, kernel in kernels.items())
        wait_for_others(self, scope)

    def check_build(self: Any, code: str) -> bool:
        return "amx" not in code or try_out(self, code)

    with (
        mock.patch.multiple(AsyncCompile, cpp_pybinding=cpp_pybinding, wait=wait),
        mock.patch.object(VecISA, "check_build", check_build),
    ):
        yield
    for scope, name, kernel in waiting:
        scope[name] = kernel.loaded()


def _compile(kernels: list[_Kernel], submit: Callable[..., Any] | None) -> None:
    """Start to compile the kernels of a graph into one function, whose first argument is the number of the kernel."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    includes: dict[str, None] = {}
    namespaces: list[str] = []
    cases: list[str] = []
    for number, kernel in enumerate(kernels):
        includes.update(dict.fromkeys(_INCLUDE.findall(kernel.source)))
        # An extern "C" function has one name in all namespaces.
        source = _ENTRY.sub("static void kernel(", _INCLUDE.sub("", kernel.source))
        namespaces.append(f"namespace kernel_{number} {{\n{source}\n}}\n")
        types = (name.replace("const ", "") for name in kernel.argument_types)
        arguments = ", ".join(f"parse_arg<{name}>(args, {index})" for index, name in enumerate(types, 1))
        cases.append(f"case {number}: kernel_{number}::kernel({arguments}); break;")
    binding = CppPythonBindingsCodeCache.suffix_template.format(
        entry_func="kernel",
        arg_len="PyTuple_GET_SIZE(args)",  # accepts any number of arguments: kernels differ
        call_entry_func=f"switch (parse_arg<int64_t>(args, 0)) {{ {' '.join(cases)} }} Py_RETURN_NONE;",
        extra_parse_arg="",
    )
    file = "".join([*includes, *namespaces, binding])
    load = functools.cache(CppPythonBindingsCodeCache.load_async(file, "cpu", submit_fn=submit))
    for number, kernel in enumerate(kernels):
        kernel.loaded = functools.partial(_numbered, load, number)


def _numbered(load: Callable[[], Any], number: int) -> Callable[..., Any]:
    return functools.partial(load().kernel, number)
