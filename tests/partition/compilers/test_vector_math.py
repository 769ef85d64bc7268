import pytest
import torch

from tests.processes import run


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch was built without MKL")  # type: ignore[no-untyped-call]
def test_importing_the_package_calls_them() -> None:
    # In a fresh process, so that the package itself must import the module.
    program = """
import importlib, sys, torch
plain, called = torch.erfinv, []
torch.erfinv = lambda x: called.append(x.dtype) or plain(x)
importlib.reload(sys.modules["fuselayers.partition.compilers.vector_math"])
print(called)
"""
    done = run(program)
    assert (done.printed, done.errors) == ("[torch.float32, torch.float64]\n", "")
