import copy
import pickle
from typing import Any

import torch
import torch._inductor.config

from fuselayers.partition.compilers import why_inductor_is_unavailable
from fuselayers.partition.compilers.inductor import _InductorPartitioner
from fuselayers.partition.partitioners import default, min_cut


def test_a_cache_key_names_the_partitioner_and_its_sources() -> None:
    first, again = _InductorPartitioner(min_cut, name="min_cut"), _InductorPartitioner(min_cut, name="min_cut")
    assert first.uuid() == again.uuid()
    assert first.uuid() != _InductorPartitioner(default, name="default").uuid()
    assert first.uuid().startswith("min_cut-")


def test_a_users_function_never_shares_a_key() -> None:
    def mine(*args: Any, **options: Any) -> Any:
        return min_cut(*args, **options)

    assert _InductorPartitioner(mine, name=None).uuid() != _InductorPartitioner(mine, name=None).uuid()


def test_inductor_may_copy_and_pickle_its_configuration() -> None:
    held = _InductorPartitioner(min_cut, name="min_cut")
    assert copy.deepcopy(held) is held
    assert pickle.loads(pickle.dumps(held)) == held.uuid()


def test_a_missing_compiler_is_a_reason() -> None:
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert why_inductor_is_unavailable("cpu") == "no C++ compiler was found; install g++ or set CXX"
