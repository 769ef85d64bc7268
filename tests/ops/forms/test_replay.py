import gc
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fuselayers.ops.forms import alike
from fuselayers.ops.forms import replay as replay_module
from fuselayers.ops.forms.alike import MOST_ALIKE
from fuselayers.ops.forms.dispatch import run
from fuselayers.ops.forms.replay import Replays, replayed
from fuselayers.ops.forms.writer import writer
from tests.ops.forms.replay_toys import Toy, Watching, adding, launch, plus

on_kernels = pytest.mark.kernels


@pytest.fixture
def toy(library: None) -> Toy:
    return Toy(plus, "toy_plus(Tensor x, float number) -> Tensor")


class TestWhatComesAgain:
    def test_what_came_twice_is_written_down_and_run_from_then_on(self, toy: Toy) -> None:
        for forwards in (1, 2, 2, 2):
            x = torch.randn(2, 3, 8)
            assert torch.equal(toy.call(x, 0.5), x + 0.5)
            assert toy.forwards == forwards
        (text,) = toy.written
        assert re.sub(r"\bc[0-9]+", "c", text).splitlines() == [
            "def replay(a0):",
            "    t1 = c((2, 3, 8), (24, 8, 1), c)",
            "    c(a0, t1, c)",
            "    return t1",
        ]

    def test_what_never_comes_again_is_not(self, toy: Toy) -> None:
        for rows in range(1, 20):
            toy.call(torch.ones(rows, 8), 0.5)
        assert toy.written == []

    @pytest.mark.parametrize(
        "other",
        [
            (lambda x: x.double(), 0.5),
            (lambda x: x[:, 1:], 0.5),
            (lambda x: x.mT.contiguous().mT, 0.5),
            (lambda x: torch.cat((x, x))[::2], 0.5),
            (lambda x: torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x), 0.5),
            (lambda x: x, 1.5),
        ],
        ids=["dtype", "shape", "layout", "rows", "address", "option"],
    )
    def test_another_kind_of_call_is_worked_out_anew(self, toy: Toy, other: tuple[Callable[..., Any], float]) -> None:
        x = torch.randn(6, 8)
        for _ in range(3):
            toy.call(x, 0.5)
        changed, number = other[0](x), other[1]
        assert torch.equal(toy.call(changed, number), changed + number)
        assert toy.forwards == 3

    def test_kinds_that_differ_in_little_are_all_known(self, toy: Toy) -> None:
        x = torch.randn(6, 8)
        for one in (x, x.double(), x.mT.contiguous().mT) * 3:
            assert torch.equal(toy.call(one, 0.5), one + 0.5)
        assert toy.forwards == 6
        assert len(toy.written) == 3

    def test_one_tensor_in_two_places_and_then_two(self, library: None) -> None:
        def difference(x: Tensor, y: Tensor) -> Tensor:
            result = torch.empty_like(x)
            launch(x, result, 0)
            return result.sub_(y)

        toy = Toy(difference, "toy_difference(Tensor x, Tensor y) -> Tensor")
        x, y = torch.randn(2, 4, 8).unbind()
        for _ in range(3):
            assert torch.equal(toy.call(x, y), x - y)
        assert toy.forwards == 2
        for _ in range(3):
            assert torch.equal(toy.call(x, x), x - x)
        assert toy.forwards == 5

    def test_a_tensor_that_is_not_there_and_then_is(self, library: None) -> None:
        def sum_of(x: Tensor, y: Tensor | None) -> Tensor:
            result = torch.empty_like(x)
            launch(x, result, 0)
            return result if y is None else result.add_(y)

        toy = Toy(sum_of, "toy_sum(Tensor x, Tensor? y) -> Tensor")
        toy.call = lambda *given: toy.replays(given)  # type: ignore[method-assign]
        x, y = torch.randn(2, 4, 8).unbind()
        for _ in range(3):
            assert torch.equal(toy.call(x, None), x)
            assert torch.equal(toy.call(x, y), x + y)
        assert toy.forwards == 4

    def test_whole_numbers_for_floats_become_floats(self, toy: Toy) -> None:
        adding.kinds.clear()
        for _ in range(4):
            toy.call(torch.zeros(8), 2)
        assert adding.kinds == [float] * 4

    @pytest.mark.parametrize("obstacle", [lambda x: plus(x, x.sum().item()), lambda x: plus(x + outside, 0.0)])
    def test_what_cannot_be_written_down_is_worked_out(
        self, library: None, obstacle: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        toy = Toy(obstacle, "toy_hindered(Tensor x) -> Tensor")
        for _ in range(4):
            x = torch.randn(8)
            assert torch.equal(toy.call(x), obstacle(x))
        assert toy.forwards == 4
        # That it cannot be is known, and costs nothing again.
        monkeypatch.setattr(replay_module, "_kind", None)
        toy.call(torch.randn(8))

    def test_a_formula_is_left_to_torch_and_not_kept_in_memory(self, library: None) -> None:
        seen: list[int] = []

        def formula(x: Tensor) -> Tensor:
            y = x + 1
            middle = weakref.ref(y)
            y = y * 2
            seen.append(middle() is None)
            return y

        replays = Replays(lambda x: run("eager", formula, formula, (x,)))
        for _ in range(4):
            replays((torch.ones(8),))
        assert seen == [True] * 4

    def test_numbers_are_drawn_anew(self, library: None) -> None:
        toy = Toy(lambda x: plus(x + torch.rand(8), 0.0), "toy_noise(Tensor x) -> Tensor")
        for seed in range(4):
            torch.manual_seed(seed)
            expected = torch.rand(8)
            torch.manual_seed(seed)
            assert torch.equal(toy.call(torch.zeros(8)), expected)
        assert toy.forwards == 2

    def test_what_it_got_is_returned_itself(self, library: None) -> None:
        replays = Replays(lambda x, _: x)
        x = torch.ones(8, requires_grad=True)
        assert all(replays((x, None)) is x for _ in range(4))
        assert replays._known

    @pytest.mark.parametrize("option", [torch.ones(()), [1], {}], ids=["a tensor", "a list", "a dictionary"])
    def test_options_that_no_kind_can_be_made_of(self, library: None, option: Any) -> None:
        seen: list[Any] = []
        replays = Replays(lambda x, option: (seen.append(option), plus(x, 0.5))[1])
        for _ in range(4):
            assert torch.equal(replays((torch.zeros(8),), (option,)), torch.full((8,), 0.5))
        assert len(seen) == 4
        assert all(one is option for one in seen)

    def test_an_error_while_writing_is_the_callers(self, library: None) -> None:
        def refuse(x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

        toy = Toy(refuse, "toy_refuse(Tensor x) -> Tensor")
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"^out of memory$"):
                toy.call(torch.ones(8))
        assert writer() is None

    def test_what_is_never_known_again_is_written_down_a_few_times_at_most(
        self, toy: Toy, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(replay_module, "_fits", lambda tensors: lambda *given: False)
        for _ in range(20):
            assert torch.equal(toy.call(torch.zeros(8), 0.5), torch.full((8,), 0.5))
        assert toy.forwards == 20
        assert len(toy.written) == MOST_ALIKE

    def test_it_keeps_no_tensor(self, toy: Toy, what_a_test_makes: None) -> None:
        x = torch.ones(8)
        for _ in range(2):
            result = weakref.ref(toy.call(x, 0.5).untyped_storage())
        given = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        assert given() is None
        assert result() is None

    def test_another_gpu_than_the_current_one_is_worked_out(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        current = [0]
        monkeypatch.setattr(replay_module, "current_device", lambda: current[0])
        monkeypatch.setattr(Tensor, "get_device", lambda self: 0)
        x = torch.randn(8)
        for current[0], forwards in ((0, 1), (0, 2), (0, 2), (1, 3), (0, 3)):
            assert torch.equal(toy.call(x, 0.5), x + 0.5)
            assert toy.forwards == forwards

    def test_amd_has_other_kernels_for_much_memory(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "ON_AMD", True)
        short = [True]
        monkeypatch.setattr(replay_module, "has_short_offsets", lambda tensor: short[0])
        for short[0], forwards in ((True, 1), (True, 2), (True, 2), (False, 3), (False, 3), (True, 3)):
            toy.call(torch.randn(8), 0.5)
            assert toy.forwards == forwards

    def test_what_is_replayed_can_be_collected_and_run_alone(self, toy: Toy) -> None:
        x = torch.randn(4, 8)
        for _ in range(2):
            toy.call(x, 0.5)
        with replayed() as collected:
            toy.call(x, 0.5)
        ((replay, arguments),) = collected
        assert torch.equal(replay(*arguments), x + 0.5)
        toy.call(x, 0.5)
        assert len(collected) == 1
        assert toy.forwards == 2

    def test_equal_options_of_other_types_are_others(self, library: None) -> None:
        seen: list[type] = []
        replays = Replays(lambda x, option: (seen.append(type(option)), plus(x, 0.5))[1])
        for option in (1, 1.0, True) * 3:
            replays((torch.zeros(8),), (option,))
        assert seen == [int, float, bool] * 2

    def test_the_oldest_of_many_are_forgotten(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(alike, "_MOST_KEYS", 2)
        for rows in (1, 2, 3):
            x = torch.randn(rows, 8)
            for _ in range(3):
                assert torch.equal(toy.call(x, 0.5), x + 0.5)
        assert [key[0] for key in toy.replays._known] == [(2, 8), (3, 8)]

    @pytest.mark.parametrize(
        "strange", [lambda x: x.to_sparse(), lambda x: torch.empty(8, device="meta")], ids=["sparse", "meta"]
    )
    def test_tensors_without_memory(self, library: None, strange: Callable[[Tensor], Tensor]) -> None:
        calls: list[int] = []
        replays = Replays(lambda x, y: (calls.append(1), x)[1])
        x = torch.ones(8)
        for _ in range(4):
            replays((x, strange(x)))
            replays((strange(x), x))
        assert len(calls) == 8


outside = torch.ones(())


class TestWhatSeesTheCalls:
    def test_a_dispatch_mode(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with Watching() as watching:
            toy.call(torch.ones(8), 0.5)
        assert watching.seen[-1:] == ["fuselayers::toy_plus"]

    def test_a_trace_before_dispatch(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        traced = make_fx(lambda x: toy.call(x, 0.5), pre_dispatch=True)(torch.ones(8))
        assert "fuselayers.toy_plus" in traced.code
        assert torch.equal(traced(torch.zeros(8)), torch.full((8,), 0.5))

    def test_a_profiler(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with torch.profiler.profile() as profile:
            toy.call(torch.ones(8), 0.5)
        assert "fuselayers::toy_plus" in {event.name for event in profile.events()}

    def test_a_trace(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            traced = torch.jit.trace(lambda x: toy.call(x, 0.5), torch.ones(8))
        assert "fuselayers::toy_plus" in str(traced.graph)
        assert torch.equal(traced(torch.zeros(8)), torch.full((8,), 0.5))

    def test_a_compiler(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        whole = torch.compile(lambda x: toy.call(x, 0.5), backend=backend, fullgraph=True)
        assert torch.equal(whole(torch.ones(8)), torch.full((8,), 1.5))
        assert seen == ["fuselayers.toy_plus.default"]

    def test_a_transform(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        assert toy.forwards == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes one by one what it has no rule for
            out = torch.vmap(lambda x: toy.call(x, 0.5))(torch.ones(3, 8))
        assert torch.equal(out, torch.full((3, 8), 1.5))
        assert toy.forwards == 3

    def test_what_a_transform_left(self, toy: Toy) -> None:
        left: list[Tensor] = []
        torch.func.grad(lambda x: (left.append(x), x.sum())[1])(torch.ones(8))
        for _ in range(3):
            assert torch.equal(toy.call(left[0], 0.5), torch.full((8,), 1.5))
        assert toy.written == []

    def test_a_subclass(self, toy: Toy) -> None:
        class Mine(Tensor):
            pass

        for _ in range(3):
            out = toy.call(torch.ones(8).as_subclass(Mine), 0.5)
        assert type(out) is Mine
        assert toy.forwards == 3

    def test_numbers_that_stand_for_their_negatives(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8, 2)[:, 1], 0.5)
        x = torch.view_as_complex(torch.ones(8, 2)).conj().imag
        assert x.is_neg()
        for _ in range(3):
            assert torch.equal(toy.call(x, 0.5), torch.full((8,), -0.5))

    def test_inference_mode(self, toy: Toy) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                for _ in range(4):
                    x = torch.randn(4, 8)
                    out = toy.call(x, 0.5)
                    assert out.is_inference() is (mode is torch.inference_mode)
                    assert torch.equal(out, x + 0.5)
        assert len(toy.written) == 2

    def test_a_function_mode(self, toy: Toy) -> None:
        class Zeros(TorchFunctionMode):
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = func(*args, **kwargs or {})
                return torch.zeros_like(out) if "toy_plus" in str(func) else out

        for _ in range(3):
            with Zeros():
                assert torch.equal(toy.call(torch.ones(8), 0.5), torch.zeros(8))
            toy.call(torch.ones(8), 0.5)
        assert toy.forwards == 5

    def test_a_default_device_sees_nothing(self, toy: Toy) -> None:
        with torch.device("meta"):
            for _ in range(3):
                toy.call(torch.ones(8, device="cpu"), 0.5)
        assert toy.forwards == 2

    @pytest.mark.parametrize("dtypes", [(torch.bfloat16, None), (torch.bfloat16, torch.float16)])
    def test_autocast(self, library: None, dtypes: tuple[torch.dtype | None, ...]) -> None:
        replays = Replays(lambda x, weight: plus(x @ weight, 0.5))
        x, weight = torch.randn(4, 8), torch.randn(8, 8)
        for dtype in dtypes * 4:
            with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                assert replays((x, weight)).dtype == (dtype or torch.float32)
        assert sum(map(len, replays._known.values())) == 2

    def test_the_default_dtype(self, library: None) -> None:
        replays = Replays(lambda x: plus(x + torch.zeros(8), 0.5))
        try:
            for dtype in (torch.float32, torch.float64) * 3:
                torch.set_default_dtype(dtype)
                assert replays((torch.ones(8, dtype=torch.float32),)).dtype == dtype
        finally:
            torch.set_default_dtype(torch.float32)

    def test_a_cpu_without_kernels(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "INTERPRETED", False)
        for _ in range(4):
            toy.call(torch.ones(8), 0.5)
        assert toy.forwards == 4
