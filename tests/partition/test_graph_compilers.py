import pytest
import torch
import torch._inductor.config
from torch import Tensor

from fuselayers import errors
from fuselayers.partition import FallbackWarning, aot_function, print_compile, ts_compile


def chain(a: Tensor, b: Tensor) -> Tensor:
    return (a + b).cos().cos()


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_said", set())


def test_print_compile_shows_both_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    a, b = torch.randn(3, requires_grad=True), torch.randn(3)
    out = aot_function(chain, print_compile)(a, b)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), a), torch.autograd.grad(chain(a, b).sum(), a))
    forward, backward = capsys.readouterr().out.strip().split("\n\n\n\n")
    assert "torch.ops.aten.cos.default" in forward
    assert "tangents_1" in backward


def test_ts_compile_says_once_what_serves() -> None:
    traced = aot_function(chain, ts_compile, dynamic=True)
    text = (
        r"^ts_compile: TorchScript's fusers, NNC and nvFuser, are gone from PyTorch; (Inductor compiles the graph|the "
        r"graph runs op by op \(.*\))\. Write fuse\(fn, backend='inductor'\) instead of aot_function\(fn, ts_compile"
    )
    with pytest.warns(FallbackWarning, match=text) as said:
        for size in (3, 5):
            a, b = torch.randn(size, 2, requires_grad=True), torch.randn(size, 2)
            out = traced(a, b)
            torch.testing.assert_close(out, chain(a, b))
            torch.testing.assert_close(torch.autograd.grad(out.sum(), a), torch.autograd.grad(chain(a, b).sum(), a))
    assert len([one for one in said if one.category is FallbackWarning]) == 1
