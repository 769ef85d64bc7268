"""Fixtures of every test: the same random numbers, and no compiled code of another test file."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# pytest attaches a handler to each logger that does not propagate. With a handler here, torch logs all that it traces,
# which takes a sixth of the time of a compilation.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _nothing_measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the user's measurements of the machine out of the tests, and those of the tests out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSELAYERS_CACHE", str(tmp_path_factory.mktemp("cache")))
        # After each compilation Dynamo empties the processor's cache and times the guards for its log. It takes 30 ms.
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(autouse=True, scope="module")
def _no_compiled_code_of_others() -> Iterator[None]:
    # Dynamo counts recompilations per code object and gives up at a limit, so one file's calls could turn another
    # file's compiled function into a plain one.
    yield
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(autouse=True, scope="module")
def _no_garbage_of_others() -> None:
    # Later collections skip the objects that are alive now. Otherwise they take half the time of the tests.
    gc.collect()
    gc.freeze()


@pytest.fixture
def inductor_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the backend "inductor" trace and cut as ever, but run the graphs op by op: compiling takes seconds."""
    from fuselayers._torch.tracing import boxed

    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx_inner", lambda graph_module, *_, **__: boxed(graph_module)
    )


@pytest.fixture
def own_components() -> Iterator[None]:
    """Unregister the components that a test registers."""
    from fuselayers.components import KINDS, names
    from fuselayers.components.registry import unregister

    before = {kind: names(kind) for kind in KINDS}
    yield
    for kind in KINDS:
        for name in set(names(kind)).difference(before[kind]):
            unregister(kind, name)


@pytest.fixture
def one_process_mesh() -> Iterator[Any]:
    """A device mesh of this process alone."""
    import torch.distributed as dist

    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # The fake group sends nothing. In a mesh of one process each local part is the whole.
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    from fuselayers.ops.implementations.launch import why_no_kernels

    reason = why_no_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if reason is not None:
        for item in items:
            if item.get_closest_marker("kernels"):
                item.add_marker(pytest.mark.skip(reason=reason))
