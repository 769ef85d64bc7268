import copy
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._dynamo.utils import counters

from fuselayers.partition import (
    BackendUnavailableError,
    CostModel,
    Machine,
    budget,
    default,
    fuse,
    machine_of,
    min_cut,
    saved_bytes,
)
from fuselayers.partition.compilers import inductor, why_inductor_is_unavailable
from fuselayers.partition.compilers.inductor import _InductorPartitioner
from fuselayers.partition.machine import write_tuned
from fuselayers.partition.partitioners import Partitioner, SavePolicy
from tests.processes import run


def key(cut: Partitioner, *, torch_random: bool = False) -> str:
    return _InductorPartitioner(cut, {"cpu"}, torch_random=torch_random).uuid()


class TestCacheKey:
    def test_the_same_again(self) -> None:
        for rule in (default, min_cut, budget(0.5)):
            assert key(rule) == key(rule)
        assert key(budget(0.5)) == key(budget(0.5))

    def test_of_everything_that_makes_another_cut(self) -> None:
        cpu = CostModel(machine_of("cpu"))
        rules = [
            default,
            min_cut,
            budget(0.5),
            budget(0.25),
            budget(1),
            budget(1.0),
            budget(1024),
            SavePolicy("min_cut", cost=cpu),
            SavePolicy("min_cut", cost=dataclasses.replace(cpu, memory_price=2.0)),
            SavePolicy("min_cut", cost=dataclasses.replace(cpu, fused=False)),
            SavePolicy("min_cut", cost=dataclasses.replace(cpu, machine=machine_of("cuda"))),
            budget(0.5, cost=cpu),
        ]
        keys = [key(rule, torch_random=random) for rule in rules for random in (False, True)]
        assert len(set(keys)) == 2 * len(rules)

    def test_of_the_machine_that_was_measured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FUSELAYERS_CACHE", str(tmp_path))
        before = key(min_cut)
        write_tuned("cpu", Machine("measured", 1e10, 2e10, 3e10, 4e10, 5e-6))
        assert key(min_cut) != before

    def test_of_no_machine_that_the_graph_is_not_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Asking for a GPU's name initialises CUDA, and workers that are forked later cannot use it."""
        asked: list[str] = []
        monkeypatch.setattr(inductor, "machine_of", lambda device_type: asked.append(device_type))
        fuse(lambda x: x.sin(), backend="inductor", fallback=())(torch.ones(3))
        assert asked == ["cpu"]
        _InductorPartitioner(min_cut, {"cuda", "cpu"}, torch_random=False)
        assert asked == ["cpu", "cpu", "cuda"]

    def test_of_whether_saved_memory_is_given_away(self) -> None:
        keys = set()
        for donated in (False, True):
            with torch._functorch.config.patch(donated_buffer=donated):
                keys.add(key(min_cut))
        assert len(keys) == 2

    def test_a_users_function_never_shares_one(self) -> None:
        def mine(*args: Any, **options: Any) -> Any:
            return min_cut(*args, **options)

        assert key(mine) != key(mine)

    def test_inductor_may_copy_and_pickle_its_configuration(self) -> None:
        held = _InductorPartitioner(min_cut, {"cpu"}, torch_random=False)
        assert copy.deepcopy(held) is held
        assert pickle.loads(pickle.dumps(held)) == held.uuid()


COMPILE_ON_A_CPU = """
import torch
from fuselayers.partition import fuse

x = torch.ones(8, requires_grad=True)
for backend in ("inductor", "auto"):
    fuse(lambda x: x.sin().exp(), backend=backend)(x).sum().backward()
assert not torch.cuda.is_initialized()
"""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_function_on_a_cpu_leaves_the_gpu_alone() -> None:
    ended = run(COMPILE_ON_A_CPU)
    assert ended.code == 0, ended.errors


@pytest.mark.slow
def test_code_of_another_partitioner_is_not_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def layer(x: Tensor) -> Tensor:
        return (x + 1).cos().cos().sin()

    def bytes_of(partition: Any) -> int:
        torch.compiler.reset()
        return saved_bytes(fuse(layer, backend="inductor", partition=partition), x)

    x = torch.randn(64, 64, requires_grad=True)
    one = 64 * 64 * 4
    counters.clear()
    found = [bytes_of(partition) for partition in ("default", "min_cut", "default")]
    assert found == [3 * one, one, 3 * one]
    hits = counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"]
    assert hits > 0, "nothing was found in the cache the second time, so this test tests nothing"


def test_a_missing_compiler_is_a_reason() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert why_inductor_is_unavailable("cpu") == "no C++ compiler was found; install g++ or set CXX"


def test_a_negative_view_is_refused() -> None:
    x = torch.tensor([2 + 2j, 1 - 4j]).conj().imag
    with pytest.raises(BackendUnavailableError, match=r"Inductor ignores the negative bit of an input, "):
        fuse(torch.sin, backend="inductor", fallback=())(x)
