import re
import threading
import time
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from fuselayers import errors
from fuselayers.partition import BackendUnavailableError, FallbackWarning, FusionReport, backends, fuse, min_cut


def wave(x: Tensor) -> Tensor:
    return x.sin().cos()


@pytest.fixture(autouse=True)
def _nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture
def no_compiler() -> Iterator[None]:
    # Inductor reads this setting, so its search for a compiler fails.
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        yield


@pytest.mark.usefixtures("no_compiler")
class TestWithoutACompiler:
    @pytest.mark.parametrize("backend", ["auto", "inductor"])
    def test_falls_back_and_says_so_once(self, backend: str) -> None:
        x = torch.randn(4, requires_grad=True)
        first, second = fuse(wave, backend=backend), fuse(torch.tan, backend=backend)
        with pytest.warns(
            FallbackWarning, match=r"^backend 'inductor' is not used: no C\+\+ compiler was found;"
        ) as said:
            outputs = first(x), second(x)
        torch.testing.assert_close(outputs, (wave(x), x.tan()))
        assert len([warning for warning in said if warning.category is FallbackWarning]) == 1
        assert first.served_by == ("eager",)

    def test_is_listed_and_raises_when_told_to(self) -> None:
        status = {backend.name: backend for backend in backends()}
        assert not status["inductor"].available
        assert status["inductor"].hint == "apt install g++"
        assert status["auto"].reason == "takes eager, the first of inductor and eager that works"
        assert status["eager"].available
        text = (
            r"^no backend could compile this function \(inductor: no C\+\+ compiler was found; install g\+\+ or set "
            r"CXX\); fix the cause, or allow fallback=\('eager',\)$"
        )
        with pytest.raises(BackendUnavailableError, match=text):
            fuse(wave, backend="inductor", fallback=())(torch.randn(4))


def test_a_compiler_that_is_there_and_fails_is_no_compiler(tmp_path: Path) -> None:
    broken = tmp_path / "broken-g++"
    cases = '*version*) echo "g++ (Broken) 12.0.0";; *) echo "no cc1plus" >&2; exit 1;;'
    broken.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    broken.chmod(0o755)

    def own(x: torch.Tensor) -> torch.Tensor:  # unique, so that no cache holds its compiled code
        return (x.sin() * 1.2578).cos()

    x = torch.randn(5, requires_grad=True)
    with torch._inductor.config.patch({"cpp.cxx": (str(broken),), "force_disable_caches": True}):
        fused = fuse(own)
        with pytest.warns(FallbackWarning, match=r"^backend 'inductor' is not used: \w+: .*; 'eager' is used instead"):
            out = fused(x)
    assert fused.served_by == ("eager",)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(own(x).sum(), x)[0])


def _without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._inductor.compile_fx.compile_fx_inner")


def _with_fewer_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda graph_module, example_inputs: graph_module)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_without_a_name, "ImportError: cannot import name 'compile_fx_inner' .*"),
        (_with_fewer_arguments, "TypeError: .* got an unexpected keyword argument .*"),
    ],
)
def test_a_private_name_of_torch_that_has_changed_is_no_reason_to_fall_back(
    change: Any, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    with pytest.raises(
        BackendUnavailableError,
        match=rf"^this version of fuselayers does not fit torch {re.escape(torch.__version__)}, whose private names "
        rf"have changed: {error} \(inductor\.py, line \d+\); install versions that fit, or name another backend than "
        "'inductor'$",
    ):
        fuse(wave)(torch.randn(4))
    monkeypatch.undo()
    torch.testing.assert_close(fuse(wave, backend="eager")(torch.ones(4)), wave(torch.ones(4)))


def test_status_of_this_machine() -> None:
    status = {backend.name: backend for backend in backends()}
    assert set(status) == {"auto", "eager", "inductor", "triton", "nvfuser"}
    if status["inductor"].available:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            fused = fuse(wave, backend="auto")
            fused(torch.randn(4))
        assert status["auto"].reason == "takes inductor, the first of inductor and eager that works"
        assert str(fused.report()) == "wave(float32[4]) forward: inductor, the first that works"


def test_triton_is_for_gpus_and_what_serves_on_a_cpu_is_said() -> None:
    reason = "Triton compiles for GPUs, and this runs on a CPU"
    status = {backend.name: backend for backend in backends()}["triton"]
    assert (status.available, status.reason, status.hint) == (False, reason, "")
    fused = fuse(wave, backend="triton", fallback=("eager",))
    x = torch.randn(4)
    with pytest.warns(FallbackWarning, match=rf"^backend 'triton' is not used: {reason}; 'eager' is used instead$"):
        torch.testing.assert_close(fused(x), wave(x))
    assert fused.served_by == ("eager",)
    with pytest.raises(
        BackendUnavailableError, match=rf"^no backend could compile this function \(triton: {reason}\); "
    ):
        fuse(torch.tan, backend="triton", fallback=())(x)


class TestReport:
    def test_before_the_first_call(self) -> None:
        assert fuse(wave).report() == FusionReport(())
        assert str(fuse(wave).report()) == "nothing is compiled yet: call the function first"

    def test_a_line_for_each_graph(self) -> None:
        fused = fuse(torch.add, backend="eager")
        fused(torch.ones(3, 4, requires_grad=True), torch.ones(4))
        fused(torch.ones(2, 4, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
        assert str(fused.report()).splitlines() == [
            "add(float32[3, 4], float32[4]) training: eager, as asked",
            "add(float64[*, 4], float64[4]) forward: eager, as asked",
        ]

    def test_a_module_has_it_too_and_many_inputs_are_counted(self) -> None:
        fused = fuse(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), backend="eager", partition="default")
        fused(torch.ones(1, 2))
        (graph,) = fused.report().graphs
        assert re.fullmatch(r"Sequential\((float32\[[\d, ]+\], ){3}2 more\) training, default", graph.name)
        assert graph.served_by == "eager"


def test_the_first_compilation_that_takes_long_says_what_it_does(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second in place of three, still longer than these compilations take.
    module = import_module("fuselayers.partition.backends")
    monkeypatch.setattr(module, "_SECONDS", 1.0)
    monkeypatch.setattr(module, "_warned_of_wait", threading.Event())

    def slow(*arguments: Any, **options: Any) -> Any:
        time.sleep(1.2)
        return min_cut(*arguments, **options)

    fuse(wave, backend="eager")(torch.ones(3, requires_grad=True))
    assert not caplog.messages
    fused = fuse(wave, backend="eager", partition=slow)
    for size in (3, 5):
        fused(torch.ones(size, requires_grad=True))
    (line,) = [line for line in caplog.messages if " a graph of " in line]
    assert line.startswith("eager traces a graph of ")
    assert line.endswith("set fusion=off in a config, use level='layers' in swap, or leave fuse out")
