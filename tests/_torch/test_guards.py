import gc
from collections.abc import Callable
from typing import Any

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
