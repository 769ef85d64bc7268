import json
import math
import re
import sys
import threading
import time
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from fuselayers import ops
from fuselayers._torch.dispatch import as_a_compiler
from fuselayers.ops.implementations import dispatch
from fuselayers.partition import (
    BackendUnavailableError,
    auto,
    auto_file,
    budget,
    fuse,
    saved_bytes,
    warm_up,
)
from fuselayers.partition.auto import fastest, guard_seconds, seconds_of
from tests.partition.measured import check, inputs, only, wave

pytestmark = pytest.mark.usefixtures("own_memory")


def reason(measured: str, served_by: str) -> str:
    return f"not worth fusing, {measured}" if served_by == "plain" else measured


class TestWhichServes:
    @pytest.mark.usefixtures("eager_as_inductor")
    @pytest.mark.parametrize("fastest", ["inductor", "eager", "plain"])
    def test_the_fastest_serves_and_the_numbers_stay(self, measured: Any, fastest: str) -> None:
        clock, fused = measured(fastest), fuse(wave)
        for _ in range(3):
            check(fused, *inputs())
        assert clock.asked == [["inductor", "eager", "plain"]]
        report = only(fused)
        assert (report.served_by, report.reason) == (fastest, reason("measured", fastest))
        assert report.seconds[fastest] == 1.0
        assert fused.served_by == (fastest,)

    @pytest.mark.usefixtures("eager_as_inductor")
    @pytest.mark.parametrize("fastest", ["inductor", "eager", "plain"])
    def test_what_was_measured_before_serves_at_once(
        self, measured: Any, fastest: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        measured(fastest)
        fuse(wave)(*inputs())
        monkeypatch.setattr(auto, "seconds_of", None)
        torch.compiler.reset()
        again = fuse(wave)
        check(again, *inputs())
        assert (only(again).served_by, only(again).reason) == (fastest, reason("measured before", fastest))

    @pytest.mark.slow
    @pytest.mark.parametrize(("size", "served_by"), [(8, "plain"), (1 << 22, "inductor")])
    def test_the_real_clock(self, size: int, served_by: str) -> None:
        fused = fuse(wave, dynamic=False)
        check(fused, *inputs(size))
        report = only(fused)
        assert f"{served_by}, {reason('measured', served_by)}: " in str(fused.report())
        assert report.served_by == served_by == fastest(report.seconds)
        assert set(report.seconds) == {"inductor", "eager", "plain"}
        assert report.seconds[served_by] <= 1.02 * report.seconds["plain"]

    @pytest.mark.usefixtures("eager_as_inductor")
    def test_a_forward_alone_and_a_training_step_are_two_questions(self, measured: Any) -> None:
        clock, fused = measured("eager"), fuse(wave)
        check(fused, *inputs())
        with torch.no_grad():
            fused(*inputs())
        assert len(clock.asked) == 2
        assert [one.name.split()[-1] for one in fused.report().graphs] == ["training", "forward"]

    @pytest.mark.parametrize(("trains", "served_by"), [(True, "inductor"), (False, "plain")])
    def test_a_tie_without_a_backward_goes_to_the_plain_graph(
        self, trains: bool, served_by: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(auto, "seconds_of", lambda candidates, inputs, **_: dict.fromkeys(candidates, 1.0))
        for _ in range(2):  # measured, then remembered
            torch.compiler.reset()
            fused = fuse(wave)
            with torch.set_grad_enabled(trains):
                fused(*inputs())
            assert fused.served_by == (served_by,)


@pytest.mark.usefixtures("eager_as_inductor")
class TestWhen:
    def test_not_before_its_time(self, measured: Any) -> None:
        clock, fused = measured("eager"), fuse(wave)
        with warm_up(1000):
            for _ in range(3):
                fused(*inputs())
            assert only(fused).reason == "the first that works; not measured yet"
        assert clock.asked == []
        fused(*inputs())
        assert len(clock.asked) == 1

    def test_never_without_warm_up_whatever_was_measured(self, measured: Any) -> None:
        clock = measured("plain")
        fuse(wave)(*inputs())
        torch.compiler.reset()
        with warm_up(math.inf):
            fused = fuse(wave)
            fused(*inputs())
        assert fused.served_by == ("inductor",)
        assert len(clock.asked) == 1

    def test_a_checkpointed_graph_keeps_the_backend_it_began_with(self, measured: Any) -> None:
        clock, fused = measured("plain"), fuse(wave)
        a, b = inputs()
        checkpoint(fused, a, b, use_reentrant=False).sum().backward()
        fused(a, b)
        assert clock.asked == []
        assert only(fused).reason.endswith("since it runs under hooks for saved tensors, as in a checkpoint")
        torch.testing.assert_close(a.grad, torch.autograd.grad(wave(a, b).sum(), a)[0])

    def test_not_between_the_ranks_of_a_distributed_run(self, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, fused = measured("plain"), fuse(wave)
        with warm_up(1000):
            fused(*inputs())
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        fused(*inputs())
        assert clock.asked == []
        assert fused.served_by == ("inductor",)

    def test_another_thread_is_served_meanwhile(self, monkeypatch: pytest.MonkeyPatch) -> None:
        measuring, go_on = threading.Event(), threading.Event()

        def slow(candidates: Any, inputs: Any, **_: Any) -> dict[str, float]:
            measuring.set()
            assert go_on.wait(60)
            return dict.fromkeys(candidates, 1.0)

        monkeypatch.setattr(auto, "seconds_of", slow)
        fused = fuse(wave)
        with warm_up(1000):
            fused(*inputs())
        one = threading.Thread(target=fused, args=inputs())
        one.start()
        assert measuring.wait(60)
        try:
            check(fused, *inputs())
        finally:
            go_on.set()
            one.join()

    def test_a_checkpoint_meanwhile_settles_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its forward ran with what the graph began with, and so must its recompute."""
        fused = fuse(wave)
        a, b = inputs()
        with warm_up(1000):
            fused(a, b)

        def while_another_thread_checkpoints(candidates: Any, inputs: Any, **_: Any) -> dict[str, float]:
            other = threading.Thread(target=lambda: forwards.append(checkpoint(fused, a, b, use_reentrant=False)))
            other.start()
            other.join()
            return {name: 1.0 if name == "plain" else 2.0 for name in candidates}

        forwards: list[Tensor] = []
        monkeypatch.setattr(auto, "seconds_of", while_another_thread_checkpoints)
        fused(a, b)
        assert fused.served_by == ("inductor",)
        torch.testing.assert_close(torch.autograd.grad(forwards[0].sum(), a), torch.autograd.grad(wave(a, b).sum(), a))

    def test_other_threads_stay_fused_while_candidates_are_compiled(self) -> None:
        compiled = fuse(wave, backend="inductor", partition=budget(0.5))
        a, b = inputs()
        compiled(a, b)
        calls = []
        with as_a_compiler():
            other = threading.Thread(target=lambda: calls.append(compiled(a, b)))
            other.start()
            other.join()
        assert "CompiledFunction" in type(calls[0].grad_fn).__name__


@pytest.mark.usefixtures("eager_as_inductor")
class TestWhatIsNeverMeasured:
    def test_a_budget_is_kept(self, measured: Any) -> None:
        clock, fused = measured("plain"), fuse(wave, partition=budget(0.5))
        check(fused, *inputs())
        assert clock.asked == []
        assert fused.served_by == ("inductor",)

    def test_a_graph_that_draws_torchs_numbers(self, measured: Any) -> None:
        clock = measured("plain")
        fused = fuse(lambda x: F.dropout(x, 0.5) * 2)
        for _ in range(2):
            fused(torch.ones(64, requires_grad=True))
        assert clock.asked == []
        assert only(fused).reason == (
            "the first that works; not measured, since the graph draws torch's own random numbers"
        )

    def test_a_measurement_that_fails_is_said_and_stops_nothing(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fails(*args: Any, **kwargs: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

        monkeypatch.setattr(auto, "seconds_of", fails)
        fused = fuse(wave)
        check(fused, *inputs())
        assert only(fused).reason == (
            "the first that works; not measured, since measuring failed with OutOfMemoryError, see the log"
        )
        (record,) = [one for one in caplog.records if one.name == "fuselayers"]
        assert record.levelname == "WARNING"
        assert record.getMessage() == (
            "wave(float32[12], float32[12]) training was not measured: OutOfMemoryError: "
            "CUDA out of memory.\nTried to allocate"
        )

    def test_tensor_subclasses(self, measured: Any) -> None:
        clock, fused = measured("plain"), fuse(wave)
        a, b = inputs()
        fused(TwoTensor(a.detach(), a.detach()), b)
        assert clock.asked == []


@pytest.mark.usefixtures("eager_as_inductor")
class TestMeasuringLeavesNoTrace:
    def test_writes_that_no_version_counts(self) -> None:
        def step(x: Tensor, count: Tensor) -> Tensor:
            count.data.add_(1)
            return x * count

        fused, count = fuse(step), torch.zeros(3)
        for expected in (1.0, 2.0):
            fused(torch.ones(3), count)
            assert count.tolist() == [expected] * 3
        assert only(fused).reason.endswith("measured")

    def test_masks_are_those_of_a_run_without_it(self) -> None:
        def layer(x: Tensor) -> Tensor:
            return ops.dropout(x, 0.5) * x

        def losses(seconds: float) -> list[Tensor]:
            torch.compiler.reset()
            torch.manual_seed(3)
            fused, x = fuse(layer), torch.ones(4, 64, requires_grad=True)
            with warm_up(seconds):
                results = [fused(x).detach() for _ in range(4)]
            assert (only(fused).reason.endswith("measured")) is (seconds == 0)
            return [*results, torch.rand(2)]

        torch.testing.assert_close(losses(0), losses(1000), rtol=0, atol=0)

    def test_what_a_graph_overwrites_is_overwritten_once_per_call(self) -> None:
        norm, twin = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
        fused, x = fuse(norm), torch.randn(16, 5, requires_grad=True)
        for _ in range(3):
            torch.testing.assert_close(fused(x), twin(x))
        torch.testing.assert_close(norm.state_dict(), twin.state_dict())
        assert only(fused.fused).reason.endswith("measured")  # type: ignore[arg-type]

    def test_an_input_that_needs_a_gradient_is_overwritten_too(self) -> None:
        def double(x: Tensor, y: Tensor) -> Tensor:
            x.mul_(2)
            return x * y

        x, y = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
        fused = fuse(double)
        for _ in range(2):
            results = []
            for fn in (double, fused):
                own = x * 1
                out = fn(own, y)
                results.append((own, out, *torch.autograd.grad(out.sum(), (x, y))))
            torch.testing.assert_close(results[0], results[1])
        assert only(fused).reason.endswith("measured")

    @pytest.mark.parametrize("shares_later", [True, False])
    def test_a_view_of_another_input_is_overwritten_once_per_call(self, shares_later: bool) -> None:
        def step(x: Tensor, view: Tensor) -> Tensor:
            y = x + 1
            view.mul_(2)
            return y + x

        fused = fuse(step)
        for seconds, shares in ((1000, True), (0, shares_later), (0, shares_later)):
            results = []
            for fn in (step, fused):
                x = torch.ones(30)
                view = (x if shares else torch.ones(30))[:10]
                with warm_up(seconds):
                    out = fn(x, view)
                # The graph for inputs that share memory also runs where they no longer do, with another result.
                results.append((out, x, view) if shares else (x, view))
            torch.testing.assert_close(results[1], results[0])
        assert only(fused).reason == "the first that works; not measured, since it writes to inputs that share memory"

    def test_a_buffer_that_is_a_view_of_another_is_overwritten_once_per_call(self) -> None:
        class Doubling(nn.Module):
            whole: Tensor
            view: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("whole", torch.ones(30))
                self.register_buffer("view", self.whole[:10])

            def forward(self, x: Tensor) -> Tensor:
                y = self.whole + x
                self.view.mul_(2)
                return y + self.whole

        module, twin = Doubling(), Doubling()
        fused, x = fuse(module), torch.ones(30)
        for _ in range(3):
            torch.testing.assert_close(fused(x), twin(x))
        torch.testing.assert_close(module.state_dict(), twin.state_dict())
        assert only(fused.fused).reason.endswith("since it writes to inputs that share memory")  # type: ignore[arg-type]

    def test_gradients_are_not_accumulated(self) -> None:
        x, y = inputs()
        fused = fuse(wave)
        fused(x, y)
        assert only(fused).reason.endswith("measured")
        assert x.grad is None


@pytest.mark.usefixtures("eager_as_inductor")
class TestSizesThatChange:
    def test_each_power_of_two_is_a_question(self, measured: Any) -> None:
        clock, fused = measured("plain"), fuse(wave, dynamic=True)
        for size in (5, 6, 7, 9, 15):
            check(fused, *inputs(size))
        assert clock.asked == [["inductor", "plain"]] * 2
        (machine,) = json.loads(auto_file().read_text()).values()
        assert [name.rpartition("]")[2] for name in machine] == [", 4+", ", 8+"]
        assert all(name.startswith("wave(float32[*], float32[*]) training") for name in machine)

    def test_what_is_remembered_serves_without_a_measurement(self, measured: Any) -> None:
        clock = measured("plain")
        fuse(wave, dynamic=True)(*inputs(5))
        torch.compiler.reset()
        fused = fuse(wave, dynamic=True)
        check(fused, *inputs(7))
        assert len(clock.asked) == 1
        assert fused.served_by == ("plain",)


@pytest.mark.usefixtures("eager_as_inductor")
class TestWhatAChoiceIsFor:
    def test_autocast_is_another_question(self, measured: Any) -> None:
        clock, fused = measured("eager"), fuse(lambda x, w: x @ w)
        x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
        fused(x, w)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert fused(x, w).dtype == torch.bfloat16
        assert len(clock.asked) == 2
        assert len({one.identity for one in fused.report().graphs}) == 2

    def test_inference_mode_is_measured(self, measured: Any) -> None:
        clock, fused = measured("plain"), fuse(nn.Linear(3, 3))
        with torch.inference_mode():
            for _ in range(3):
                fused(torch.ones(2, 3))
        assert len(clock.asked) == 1

    def test_another_set_of_candidates_is_another_question(
        self, measured: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As after a compiler was installed: what was measured without it says nothing of it."""
        clock = measured("plain")
        with monkeypatch.context() as patch:
            patch.setattr(auto, "why_unavailable", lambda name, devices: "none" if name == "inductor" else None)
            fuse(wave)(*inputs())
        torch.compiler.reset()
        fuse(wave)(*inputs())
        assert clock.asked == [["eager", "plain"], ["inductor", "eager", "plain"]]

    def test_on_a_gpu_the_kernels_are_a_candidate_where_a_graph_has_some(
        self, measured: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = measured("triton")
        monkeypatch.setattr(dispatch, "_is_on_gpu", lambda tensor: True)
        for one in (auto, sys.modules["fuselayers.partition.backends"]):  # by attributes the second is the function
            monkeypatch.setattr(one, "why_unavailable", lambda name, _: "no GPU" if name == "nvfuser" else None)
        fused = fuse(ops.gated_activation)
        x = torch.randn(2, 8, requires_grad=True)
        torch.testing.assert_close(fused(x), ops.gated_activation(x))
        assert only(fused).served_by == "triton"
        fuse(wave)(*inputs())
        assert clock.asked == [["inductor", "triton", "eager", "plain"], ["inductor", "eager", "plain"]]

    def test_a_candidate_that_cannot_be_compiled_is_out(self, measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, fused = measured("plain"), fuse(wave)
        with warm_up(1000):
            fused(*inputs())

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise BackendUnavailableError("no")

        monkeypatch.setattr(auto, "compile_chain", fails)
        fused(*inputs())
        assert clock.asked == [["inductor", "plain"]]
        (machine,) = json.loads(auto_file().read_text()).values()
        assert list(machine.values()) == [{"inductor": 2.0, "eager": None, "plain": 1.0}]


class TestPinned:
    def test_without_a_fallback_it_raises(self) -> None:
        first = fuse(wave, backend="eager")
        first(*inputs())
        choice = f"pinned:eager+{only(first).identity}:triton"
        with pytest.raises(BackendUnavailableError, match=r"^no backend could compile this function \(triton: Triton"):
            fuse(wave, backend=choice, fallback=())(*inputs())

    def test_a_choice_that_was_written_down_serves(self, measured: Any) -> None:
        measured("eager")
        first = fuse(wave)
        first(*inputs())
        identity = only(first).identity
        for chosen in ("eager", "inductor", "plain"):
            torch.compiler.reset()
            fused = fuse(wave, backend=f"pinned:inductor+{identity}:{chosen}")
            check(fused, *inputs())
            assert (only(fused).served_by, only(fused).reason) == (chosen, "pinned")

    def test_all_other_graphs_have_the_first(self) -> None:
        fused = fuse(wave, backend="pinned:eager+00000000:plain")
        check(fused, *inputs())
        assert fused.served_by == ("eager",)

    def test_it_falls_back_visibly(self) -> None:
        fused = fuse(wave, backend="pinned:triton", fallback=("eager",))
        with pytest.warns(UserWarning, match="^backend 'triton' is not used: Triton compiles for GPUs"):
            fused(*inputs())
        assert only(fused).served_by == "eager"
        assert only(fused).reason.startswith("since triton is not used: Triton compiles for GPUs")


@pytest.mark.usefixtures("eager_as_inductor")
class TestModes:
    """Dynamo's graph switches gradients and autocast by calls, and what stops between two of them leaves them so."""

    @staticmethod
    def autocast_depth() -> int:
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    def test_a_measurement_that_fails_within_autocast_leaves_it(self) -> None:
        def fn(x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return torch.cond(x.sum() > 0, lambda z: z @ z, lambda z: z @ z + 1, (x,))  # type: ignore[no-any-return]

        fused = fuse(fn)
        fused(torch.ones(4, 4))
        assert only(fused).reason.startswith("the first that works; not measured, since measuring failed")
        assert self.autocast_depth() == 0
        assert not torch.is_autocast_enabled("cpu")

    def test_a_function_that_leaves_gradients_off_is_measured_with_them(self, measured: Any) -> None:
        def fn(x: Tensor) -> Tensor:
            y = x.sin()
            torch.set_grad_enabled(False)
            return y

        measured("plain")
        fused = fuse(fn, fullgraph=True)
        try:
            out = fused(torch.ones(3, requires_grad=True))
        finally:
            torch.set_grad_enabled(True)
        assert out.requires_grad
        assert only(fused).reason.endswith("measured")

    def test_an_error_in_a_plain_graph_leaves_them_as_they_were(self, measured: Any) -> None:
        def fn(x: Tensor, place: Tensor) -> Tensor:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                return x[place].sin()

        measured("plain")
        fused = fuse(fn)
        fused(torch.ones(3), torch.tensor([2]))
        assert only(fused).served_by == "plain"
        with pytest.raises(IndexError):
            fused(torch.ones(3), torch.tensor([5]))
        assert torch.is_grad_enabled()
        assert self.autocast_depth() == 0
        assert not torch.is_autocast_enabled("cpu")


@pytest.mark.usefixtures("eager_as_inductor")
def test_a_checkpoint_inside_stays_one(measured: Any) -> None:
    """The plain graph would ignore the checkpoint."""
    measured("plain")

    def part(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x.sin().cos()
        return x

    x = torch.randn(1000, requires_grad=True)
    fused = fuse(lambda x: checkpoint(part, x, use_reentrant=False))
    pinned = fuse(fused.fn, backend="eager")
    pinned(x)
    pinned = fuse(fused.fn, backend=f"pinned:eager+{only(pinned).identity}:plain")
    for one in (fused, pinned):
        assert saved_bytes(one, x) == x.nbytes
        check(one, x)
        assert only(one).served_by != "plain"


@pytest.mark.usefixtures("eager_as_inductor")
def test_a_thread_that_comes_late_does_not_measure_again(measured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with warm_up(1000):
        fused = fuse(wave)
        fused(*inputs())
    clock = measured("inductor")
    came, go = threading.Event(), threading.Event()
    consider = auto._Undecided._try_to_choose

    def wait_first(self: Any, sizes: Any, inputs: Any) -> None:
        if threading.current_thread() is late:
            came.set()
            assert go.wait(60)
        consider(self, sizes, inputs)

    monkeypatch.setattr(auto._Undecided, "_try_to_choose", wait_first)
    late = threading.Thread(target=lambda: fused(*inputs()))
    late.start()
    assert came.wait(60)
    fused(*inputs())
    go.set()
    late.join()
    assert (only(fused).served_by, only(fused).reason, len(clock.asked)) == ("inductor", "measured", 1)


class TestCheckpoints:
    """Forward and its second run take the same way, also where the fused function is inside of another one."""

    pytestmark = pytest.mark.usefixtures("eager_as_inductor")

    @staticmethod
    def two(z: Tensor) -> Tensor:
        return z.sqrt() * z.cos()

    def test_around_a_function_that_is_not_worth_fusing(self, measured: Any) -> None:
        inner = fuse(self.two, backend="inductor")
        measured("plain")
        fused = fuse(lambda q: inner(q * 2) * 3)
        x = (torch.rand(16) + 0.1).requires_grad_()
        fused(x)
        with torch.no_grad():
            fused(x)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(checkpoint(fused, x, use_reentrant=False).sum(), x)
            torch.testing.assert_close(gradient, torch.autograd.grad((self.two(x * 2) * 3).sum(), x)[0])

    def test_inside_of_a_function_that_is_not_worth_fusing(self, measured: Any) -> None:
        inner = fuse(self.two, backend="inductor")
        measured("plain")
        fused = fuse(lambda q: cast(Tensor, checkpoint(inner, q * 2, use_reentrant=False)) * 3)
        for _ in range(3):
            x = (torch.rand(16) + 0.1).requires_grad_()
            check(fused, x)
        assert fused.served_by == ("inductor",)  # the plain graph would ignore the checkpoint

    @pytest.mark.parametrize("inside", [False, True])
    def test_a_reentrant_one_draws_the_same_mask_again(self, inside: bool, measured: Any) -> None:
        """Its forward has neither gradients nor hooks."""
        module = nn.Sequential(nn.Dropout(0.5), nn.Identity())
        inner = fuse(module, backend="inductor" if inside else "auto")

        @torch.compiler.disable
        def checkpointed(x: Tensor) -> Tensor:
            return cast(Tensor, checkpoint(inner, x, use_reentrant=True))

        measured("plain")
        whole = fuse(lambda x: checkpointed(x * 1.5) * 3) if inside else checkpointed
        module.eval()
        with torch.no_grad():
            inner(torch.randn(64))
        module.train()
        for _ in range(3):
            x = torch.rand(64, requires_grad=True)
            y = whole(x)
            y.sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad == 0, y == 0)
            assert bool((y == 0).any())


@pytest.mark.usefixtures("eager_as_inductor")
class TestBehindTheGuards:
    def test_a_module_that_changes_has_another_graph(self, measured: Any) -> None:
        class Deepens(nn.Module):
            deep = False

            def forward(self, x: Tensor) -> Tensor:
                return x.cos().cos() if self.deep else x.cos()

        clock, module = measured("plain"), Deepens()
        fused, x = fuse(module), torch.randn(3)
        for module.deep in (False, False, True, True, False):
            torch.testing.assert_close(fused(x), module(x))
        assert len(clock.asked) == 2

    def test_a_graph_break_between_a_plain_graph_and_a_fused_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        answers = iter(["plain", "inductor"])

        def clock(candidates: Any, inputs: Any, **_: Any) -> dict[str, float]:
            best = next(answers)
            return {name: 1.0 if name == best else 2.0 for name in candidates}

        monkeypatch.setattr(auto, "seconds_of", clock)

        def broken(a: Tensor, b: Tensor) -> Tensor:
            c = a + b
            torch._dynamo.graph_break()
            return c.cos()

        fused = fuse(broken)
        for _ in range(3):
            check(fused, *inputs())
        assert fused.served_by == ("plain", "inductor")

    def test_a_fused_function_inside_is_part_of_the_graph(self, measured: Any) -> None:
        measured("plain")
        inner = fuse(lambda x: x.sin())
        fused, x = fuse(lambda x: inner(x * 2) * 3), torch.randn(4, requires_grad=True)
        for _ in range(3):
            torch.testing.assert_close(fused(x), (x * 2).sin() * 3)
        assert inner.served_by == ()

    def test_their_time_is_in_the_report(self, measured: Any) -> None:
        measured("plain")
        fused = fuse(wave)
        fused(*inputs())
        report = fused.report()
        assert report.guard_seconds is not None
        assert 0 < report.guard_seconds < 0.01
        assert re.fullmatch(r"Dynamo's guards take about [\d.e-]+ ms of each call", str(report).splitlines()[-1])

    def test_their_time_is_left_out_where_nothing_may_be_compiled(self) -> None:
        torch.compiler.reset()
        with torch.compiler.set_stance("fail_on_recompile"):
            assert guard_seconds.__wrapped__() is None


class TestSecondsOf:
    def test_the_backward_counts(self) -> None:
        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 1

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                time.sleep(0.01)
                return grad

        x = torch.ones(3, requires_grad=True)
        seconds = seconds_of({"eager": lambda x: (Slow.apply(x),), "plain": lambda x: (x * 1,)}, [x])  # type: ignore[no-untyped-call]
        assert seconds["eager"] > 0.01 > seconds["plain"] > 0
        assert x.grad is None

    def test_an_input_that_is_returned_has_no_backward(self) -> None:
        came = []

        def run(x: Tensor) -> tuple[Tensor, Tensor]:
            x.register_hook(came.append)
            return x * 2, x

        seconds_of({"eager": run}, [torch.ones(3, requires_grad=True)])
        assert {tuple(gradient.tolist()) for gradient in came} == {(2.0, 2.0, 2.0)}

    def test_autocast_caches_no_weights(self) -> None:
        seen = []

        def product(x: Tensor, weight: Tensor) -> tuple[Tensor]:
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
            return (x @ weight,)

        with torch.autocast("cpu", dtype=torch.bfloat16):
            seconds_of({"eager": product}, [torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)])
            assert torch.is_autocast_cache_enabled()
        assert set(seen) == {(True, False)}
