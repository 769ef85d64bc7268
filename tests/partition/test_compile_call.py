import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers.partition.compile_call import compile_call
from fuselayers.partition.compilers import why_inductor_is_unavailable


@pytest.mark.skipif(why_inductor_is_unavailable("cpu") is not None, reason="Inductor has no C++ compiler here")
def test_a_compiled_call_says_what_it_takes() -> None:
    def product(x: torch.Tensor, y: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * y + row, row.exp()

    x, row = torch.randn(6, 5), torch.randn(5)
    takes, run = compile_call(product, (x, x, row), ((0,), (0,), ()))
    for rows in (6, 2, 40):
        given = [torch.randn(rows, 5), torch.randn(rows, 5), row]
        assert takes(given)
        for got, expected in zip(run(list(given)), product(*given), strict=True):
            torch.testing.assert_close(got, expected)
    assert not takes([x, x[:4], row])  # a guard: both have as many rows
    assert not takes([x[:1], x[:1], row])  # another: more than one
    assert not takes([torch.randn(6, 7)] * 2 + [torch.randn(7)])  # no size that may change


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, func: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{func} was called under the caller's mode")


@pytest.mark.skipif(why_inductor_is_unavailable("cpu") is not None, reason="Inductor has no C++ compiler here")
def test_a_compiled_call_leaves_the_mode_of_its_caller() -> None:
    x = torch.randn(3, 4)
    with torch.inference_mode(), Refuses(), torch._inductor.config.patch(freezing=True):
        _, run = compile_call(lambda x: (x.sin(),), (x,), ((),))
        assert torch.is_inference_mode_enabled()
    torch.testing.assert_close(run([x])[0], x.sin())
