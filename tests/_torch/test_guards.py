import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fuselayers.partition import default, fuse


def test_a_freed_function_leaves_another_one_of_its_line_compiled() -> None:
    """Both have the same code object. Without a copy for each, freeing the first crashes the second's compilation."""
    graphs = []

    def partition(*arguments: Any, **options: Any) -> Any:
        graphs.append(arguments[0])
        return default(*arguments, **options)

    def of_one_line(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return fuse(lambda x: fn(x), backend="eager", partition=partition)

    x = torch.ones(2, requires_grad=True)
    first, second = of_one_line(torch.cos), of_one_line(torch.sin)
    first(x), second(x)
    del first
    gc.collect()
    assert torch.equal(second(x), x.sin())
    assert len(graphs) == 2


# Its own process, since torch makes the folder when it imports Dynamo.
_WITHOUT_A_FOLDER = """
import torch
from fuselayers import explain, fuse
x = torch.ones(2, requires_grad=True)
for backend in ("eager", "auto"):
    fused = fuse(lambda x: x.cos() * 2, backend=backend)
    fused(x).sum().backward()
    print(torch.allclose(fused(x), x.cos() * 2), fused.served_by)
explain(fused, x)
"""


@pytest.mark.slow  # several processes
def test_a_call_works_if_the_folder_of_the_cache_cannot_be_made() -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": "/proc/nowhere"}
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT_A_FOLDER], env=environment, capture_output=True, text=True, check=False
    )
    assert [line[:4] for line in ended.stdout.splitlines()] == ["True", "True"], ended.stderr
    said = "the folder of TORCHINDUCTOR_CACHE_DIR cannot be made (FileNotFoundError: "
    assert ended.stderr.count(said) == 1
    kept = ended.stderr.split("torch's cache is in ")[1].split()[0]
    assert not os.path.exists(kept)
