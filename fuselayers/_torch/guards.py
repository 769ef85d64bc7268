"""guards -- Dynamo: compile a function behind guards, and remove compiled code from its cache."""

import collections
import contextlib
import functools
import inspect
import os
import tempfile
import traceback
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame as _eval_frame
from torch._compile import _disable_dynamo

from ..errors import in_one_line, warn_once

_Function = TypeVar("_Function", bound=Callable[..., Any])


def disable_dynamo(reason: str) -> Callable[[_Function], _Function]:
    """Decorate a function as `torch.compiler.disable` does, but import Dynamo only when the function is called."""

    def disable(fn: _Function) -> _Function:
        disabled: Any = _disable_dynamo(fn)
        disabled._torchdynamo_disable = True  # Dynamo checks this before it traces a call
        disabled._torchdynamo_disable_msg = reason
        return disabled  # type: ignore[no-any-return]

    return disable


def outside_dynamo(fn: _Function) -> _Function:
    """Decorate a function that torch calls, such as an op's implementation; Dynamo would trace it after a graph break.

    `disable_dynamo` prevents this too, but it imports Dynamo at the first call, which takes a second.
    """
    skip = _eval_frame._FrameAction.SKIP  # for this frame, and for the functions that it calls
    _eval_frame.set_code_exec_strategy(fn.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return fn


def need_cache_folder() -> None:
    """Give torch a temporary folder for its cache if the one that the user set cannot be made.

    `import torch._dynamo` makes the folder. If that fails, the module cannot be imported again in this process.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:  # torch's own is inside the folder for temporary files
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        own = _temporary_folder()
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = own.name
        warn_once(
            f"the folder of TORCHINDUCTOR_CACHE_DIR cannot be made ({in_one_line(error)}); until this process ends, "
            f"torch's cache is in {own.name}"
        )


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="torchinductor_")


def compilations_of_frame() -> int:
    """Return how often Dynamo has compiled the code that it is compiling now, this time included."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    number = None if compile_id is None else compile_id.frame_compile_id
    return 0 if number is None else number + 1


def torch_compile(fn: Any, *, name: str, recompile_limit: int, **options: Any) -> Callable[..., Any]:
    """Call `torch.compile` with a recompile limit for this function, also before 2.13, where the limit is global.

    The Python function is copied with a new code object of this name. The compiled code is freed with the copy.
    Functions that one line defines share a code object, and freeing it while Dynamo compiles another of them would
    crash the process. Dynamo remembers by file, line and name which sizes changed.

    Module hooks are guarded, also hooks that are added after tracing. By default Dynamo guards only hooks that exist.
    Equal modules share a graph, so a hook of one of them would be lost.
    """
    code = fn.__code__.replace(co_name=name)
    own = types.FunctionType(code, fn.__globals__, name, fn.__defaults__, fn.__closure__)
    weakref.finalize(own, _forget, code).atexit = False
    takes_limit = "recompile_limit" in inspect.signature(torch.compile).parameters
    if takes_limit:
        options["recompile_limit"] = recompile_limit
    need_cache_folder()
    compiled = torch.compile(own, **options)
    config: Any = torch._dynamo.config

    def call(*args: Any, **kwargs: Any) -> Any:
        before, config.skip_nnmodule_hook_guards = config.skip_nnmodule_hook_guards, False
        try:
            return compiled(*args, **kwargs)
        finally:
            config.skip_nnmodule_hook_guards = before

    def call_with_limit(*args: Any, **kwargs: Any) -> Any:
        with config.patch(recompile_limit=recompile_limit):
            return call(*args, **kwargs)

    return call if takes_limit else call_with_limit


def _forget(code: types.CodeType) -> None:
    """Free what Dynamo compiled for a code object.

    The compiled graphs are globals of a module and hold the code object, which holds them: a cycle that the garbage
    collector cannot see. The finalizers of all objects that the guards compare by identity, such as torch's functions,
    hold the guards: 200 KB per graph.
    """
    from torch._dynamo import eval_frame
    from torch._dynamo.guards import DeletedGuardManagerWrapper

    entries = torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code)
    parts = [(entry.guard_manager, id(entry.backend)) for entry in entries]
    torch._C._dynamo.eval_frame.reset_code(code)
    for guards, backend in parts:
        vars(guards).update(vars(DeletedGuardManagerWrapper("the function was freed")))
        eval_frame.cached_backends.pop(backend, None)


def dynamo_optimize(backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile as `torch.compile` does, without its wrapper, which would hide the graphs that belong to this backend."""
    from torch._dynamo import optimize

    optimized: Callable[..., Any] = optimize(backend)
    return optimized


def inner_error(error: Exception) -> Exception:
    """Return the error that a backend raised, without Dynamo's wrapper. Other errors are returned unchanged."""
    from torch._dynamo.exc import BackendCompilerFailed

    return error.inner_exception if isinstance(error, BackendCompilerFailed) else error


def is_error_of_dynamo(error: Exception) -> bool:
    """True for errors that a backend must not catch: a restart of Dynamo's analysis, an untraceable graph."""
    from torch._dynamo.exc import TorchDynamoException, exceptions_allowed_to_be_fallback

    return isinstance(error, (TorchDynamoException, *exceptions_allowed_to_be_fallback))


def unfit_torch(error: BaseException | None) -> str | None:
    """Return what in an error shows that a private name of torch is missing or has changed; None for other errors.

    Such an error is raised in a file of this folder: an AttributeError, an ImportError, or a TypeError for arguments
    that the name no longer takes. An error raised deeper inside torch is the compiler's own.
    """
    while error is not None:
        if isinstance(error, (AttributeError, ImportError, TypeError)):
            frames = traceback.extract_tb(error.__traceback__)
            last = [frame for frame in frames if frame.name != "__getattr__"][-1:]  # of a module, such as a config
            if last and Path(last[0].filename).parent == Path(__file__).parent:
                return f"{in_one_line(error)} ({Path(last[0].filename).name}, line {last[0].lineno})"
        error = error.__cause__
    return None


@contextlib.contextmanager
def forget_compiled_code(backend: Any) -> Iterator[None]:
    """On exit, remove the code that Dynamo compiled with `backend` inside this context.

    Dynamo inlines most calls, but after a graph break it compiles each called function separately. Its cache would keep
    these graphs. They would count towards the recompile limit, and their sizes would make later graphs symbolic.
    """
    need_cache_folder()
    from torch._dynamo import config, eval_frame, pgo
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.utils import CleanupManager

    compiled: list[tuple[types.CodeType, types.CodeType]] = []
    hook = register_bytecode_hook(lambda code, new_code: compiled.append((code, new_code)))
    sizes_seen = pgo._CODE_STATE
    pgo._CODE_STATE = collections.defaultdict(pgo.CodeState)
    limits = {"recompile_limit": 1 << 30, "accumulated_recompile_limit": 1 << 30}
    try:
        with config.patch(limits), torch.compiler.set_stance("default"):
            yield
    finally:
        hook.remove()
        pgo._CODE_STATE = sizes_seen
        eval_frame.cached_backends.pop(id(backend), None)
        for code, new_code in compiled:
            for entry in torch._C._dynamo.eval_frame._debug_get_cache_entry_list(code):
                state = getattr(entry.guard_manager, "extra_state", None)
                if entry.backend is backend and state is not None:
                    state.invalidate(entry, DeletedGuardManagerWrapper("traced for fuselayers.capture"))
            if new_code in CleanupManager.instance:  # holds the names that Dynamo added to the function's globals
                CleanupManager.instance._remove_id(id(new_code))
