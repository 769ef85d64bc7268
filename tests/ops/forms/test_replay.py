import gc
import inspect
import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fuselayers import ops
from fuselayers.ops.forms import launch as launch_module
from fuselayers.ops.forms import replay as replay_module
from fuselayers.ops.forms.replay import Replays, writer
from tests.ops.cases import CASES, Case
from tests.ops.contract import DEVICE, seed_of, tensors

on_kernels = pytest.mark.kernels


class Adding:
    """Stands for a Triton kernel, compiled or not: writes its first tensor and a number into its second."""

    def __init__(self) -> None:
        self.kinds: list[type] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., "Adding"]:
        def start(x: Tensor, y: Tensor, number: float, **options: Any) -> Adding:
            self.kinds.append(type(number))
            y.copy_(x.detach() + number)
            return self

        return start


adding = Adding()


def launch(x: Tensor, y: Tensor, number: float) -> None:
    launch_module.launch(adding, (1,), (x, y, number), ())


class Toy:
    """An op of torch's whose kernel is `start`, its replays, and how often it was worked out."""

    def __init__(self, library: torch.library.Library, name: str, run: Callable[..., Any], schema: str) -> None:
        self.worked_out = 0

        def counted(*arguments: Any) -> Any:
            self.worked_out += 1
            return run(*arguments)

        library.define(f"{name}{schema}")
        library.impl(name, counted, "CPU")
        self.call = Replays(getattr(getattr(torch.ops, library.ns), name).default, counted)

    @property
    def written(self) -> list[str]:
        return [str(known.__doc__) for known, _ in self.call._replays.values()]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.library.Library]:
    monkeypatch.setattr(replay_module, "INTERPRETED", True)  # the CPU has kernels then,
    monkeypatch.setattr(launch_module, "INTERPRETED", False)  # which are compiled
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the index of "cpu"
    with torch.library._scoped_library("replay_toys", "FRAGMENT") as library:
        yield library


def plus(x: Tensor, number: float) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    launch(rows, y.view(rows.shape), number)
    return y


@pytest.fixture
def toy(library: torch.library.Library) -> Toy:
    return Toy(library, "plus", plus, "(Tensor x, float number) -> Tensor")


class TestWriting:
    def test_what_came_twice_is_written_down_and_run_from_then_on(self, toy: Toy) -> None:
        for worked_out in (1, 2, 2, 2):
            x = torch.randn(2, 3, 8)
            assert torch.equal(toy.call(x, 0.5), x + 0.5)
            assert toy.worked_out == worked_out
        (text,) = toy.written
        assert re.sub(r"\bc[0-9]+", "c", text).splitlines() == [
            "def replay(a0, a1):",
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
        assert toy.worked_out == 3

    def test_one_tensor_in_two_places_and_then_two(self, library: torch.library.Library) -> None:
        def difference(x: Tensor, y: Tensor) -> Tensor:
            result = torch.empty_like(x)
            launch(x, result, 0)
            return result.sub_(y)

        toy = Toy(library, "difference", difference, "(Tensor x, Tensor y) -> Tensor")
        x, y = torch.randn(2, 4, 8).unbind()
        for _ in range(3):
            assert torch.equal(toy.call(x, x), x - x)
        assert torch.equal(toy.call(x, y), x - y)
        assert toy.worked_out == 2

    def test_views_copies_sums_and_lists(self, library: torch.library.Library) -> None:
        def much(heads: list[Tensor], scale: Tensor, keep: list[bool]) -> list[Tensor]:
            both = torch.empty(2, *heads[0].shape, dtype=torch.float64)
            unused = torch.empty(3)
            assert unused.numel()
            launch(heads[0], both[0], 0)
            launch(heads[1].contiguous(), both[1], int(keep[0]))
            total = torch.empty(heads[0].shape[-1], dtype=torch.float64)
            total.copy_(both.sum((0, 1)))
            return [both * scale, total.to(torch.float32)]

        toy = Toy(library, "much", much, "(Tensor[] heads, Tensor scale, bool[] keep) -> Tensor[]")
        for _ in range(4):
            heads, scale = [torch.randn(4, 8), torch.randn(8, 4).mT], nn.Parameter(torch.randn(8))
            both = torch.stack((heads[0], heads[1] + 1)).double()
            with torch.no_grad():
                results = toy.call(heads, scale, [True])
            torch.testing.assert_close(results, [both * scale.detach(), both.sum((0, 1)).float()])
        assert toy.worked_out == 2
        assert "(3,)" not in toy.written[0]  # a tensor that nothing reads is not made

    def test_whole_numbers_for_floats_become_floats(self, toy: Toy) -> None:
        adding.kinds.clear()
        for _ in range(4):
            toy.call(torch.zeros(8), 2)
        assert adding.kinds == [float] * 4

    @pytest.mark.parametrize(
        "obstacle", [lambda x: x + torch.rand(()), lambda x: x + x.sum().item(), lambda x: x + outside]
    )
    def test_what_cannot_be_written_down_goes_to_torch(
        self, library: torch.library.Library, obstacle: Callable[[Tensor], Tensor]
    ) -> None:
        toy = Toy(library, "hindered", obstacle, "(Tensor x) -> Tensor")
        for seed in range(4):
            x = torch.randn(8)
            torch.manual_seed(seed)
            expected = obstacle(x)
            torch.manual_seed(seed)
            assert torch.equal(toy.call(x), expected)
        assert toy.worked_out == 4

    def test_an_error_while_writing_is_the_callers(self, library: torch.library.Library) -> None:
        def refuse(x: Tensor) -> Tensor:
            raise RuntimeError("out of memory")

        toy = Toy(library, "refuse", refuse, "(Tensor x) -> Tensor")
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"^out of memory$"):
                toy.call(torch.ones(8))
        assert writer() is None

    def test_old_ones_are_forgotten(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "_MOST_REPLAYS", 2)
        for rows in (1, 2, 3):
            x = torch.randn(rows, 8)
            for _ in range(3):
                assert torch.equal(toy.call(x, 0.5), x + 0.5)
        assert len(toy.written) == 1

    def test_it_keeps_no_tensor(self, toy: Toy) -> None:
        x = torch.ones(8)
        for _ in range(2):
            result = weakref.ref(toy.call(x, 0.5).untyped_storage())
        given = weakref.ref(x.untyped_storage())
        del x
        gc.collect()
        assert given() is None
        assert result() is None

    def test_another_gpu_than_the_current_one_goes_to_torch(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(8)
        for _ in range(3):
            toy.call(x, 0.5)
        (kind,) = toy.call._replays
        toy.call._replays[kind] = toy.call._replays[kind][0], 1
        for current, worked_out in ((1, 2), (0, 3), (1, 3)):
            monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
            monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
            assert torch.equal(toy.call(x, 0.5), x + 0.5)
            assert toy.worked_out == worked_out


outside = torch.ones(())


class Watching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **kwargs or {})


class TestWhatSeesTheCalls:
    def test_a_dispatch_mode(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with Watching() as watching:
            toy.call(torch.ones(8), 0.5)
        assert watching.seen[-1:] == ["replay_toys::plus"]

    def test_a_trace_before_dispatch(self, toy: Toy, library: torch.library.Library) -> None:
        torch.library.register_fake("replay_toys::plus", lambda x, number: torch.empty_like(x), lib=library)
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        traced = make_fx(lambda x: toy.call(x, 0.5), pre_dispatch=True)(torch.ones(8))
        assert "replay_toys.plus" in traced.code
        assert torch.equal(traced(torch.zeros(8)), torch.full((8,), 0.5))

    def test_a_profiler(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with torch.profiler.profile() as profile:
            toy.call(torch.ones(8), 0.5)
        assert "replay_toys::plus" in {event.name for event in profile.events()}

    def test_a_trace(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            traced = torch.jit.trace(lambda x: toy.call(x, 0.5), torch.ones(8))
        assert "replay_toys::plus" in str(traced.graph)
        assert torch.equal(traced(torch.zeros(8)), torch.full((8,), 0.5))

    def test_a_compiler(self, toy: Toy, library: torch.library.Library) -> None:
        torch.library.register_fake("replay_toys::plus", lambda x, number: torch.empty_like(x), lib=library)
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        seen: list[str] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        whole = torch.compile(lambda x: toy.call(x, 0.5), backend=backend, fullgraph=True)
        assert torch.equal(whole(torch.ones(8)), torch.full((8,), 1.5))
        assert seen == ["replay_toys.plus.default"]

    def test_a_transform(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8), 0.5)
        assert toy.worked_out == 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch takes one by one what it has no rule for
            out = torch.vmap(lambda x: toy.call(x, 0.5))(torch.ones(3, 8))
        assert torch.equal(out, torch.full((3, 8), 1.5))
        assert toy.worked_out == 5

    def test_a_subclass(self, toy: Toy) -> None:
        class Mine(Tensor):
            pass

        for _ in range(3):
            out = toy.call(torch.ones(8).as_subclass(Mine), 0.5)
        assert type(out) is Mine
        assert toy.worked_out == 3

    def test_numbers_that_stand_for_their_negatives(self, toy: Toy) -> None:
        for _ in range(3):
            toy.call(torch.ones(8, 2)[:, 1], 0.5)
        x = torch.view_as_complex(torch.ones(8, 2)).conj().imag
        assert x.is_neg()
        assert torch.equal(toy.call(x, 0.5), torch.full((8,), -0.5))

    def test_inference_mode(self, toy: Toy) -> None:
        with torch.inference_mode():
            for _ in range(4):
                x = torch.randn(4, 8)
                out = toy.call(x, 0.5)
                assert out.is_inference()
                assert torch.equal(out, x + 0.5)
        assert toy.worked_out == 2

    def test_a_cpu_without_kernels(self, toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(replay_module, "INTERPRETED", False)
        for _ in range(4):
            toy.call(torch.ones(8), 0.5)
        assert toy.worked_out == 4


def _replays() -> list[Replays]:
    modules = [one for one in vars(ops).values() if inspect.isfunction(one)]
    homes = {inspect.getmodule(one) for one in modules}
    from fuselayers.ops.normalise import backward, forward

    return [one for home in (*homes, backward, forward) for one in vars(home).values() if isinstance(one, Replays)]


@on_kernels
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("layout", ["whole", "rows apart", "transposed", "expanded gradients"])
def test_every_op_gives_the_same_bits_again(case: Case, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def laid_out(x: Tensor) -> Tensor:
        if layout == "rows apart" and x.dim() == 2:
            x = torch.cat((x, x), dim=1)[:, : x.shape[1]]
        elif layout == "transposed" and x.dim() == 2:
            x = x.mT.contiguous().mT
        return x.detach().requires_grad_(x.is_floating_point())

    def results(inputs: list[Tensor]) -> list[Tensor]:
        out = case.op(*inputs, backend="triton", **case.options)
        outs = [one for one in (out if isinstance(out, tuple) else (out,)) if one.requires_grad]
        torch.manual_seed(1)
        incoming = [torch.randn(one.shape, dtype=one.dtype, device=DEVICE) for one in outs]
        if layout == "expanded gradients":
            incoming = [one.flatten()[0].expand(one.shape) for one in incoming]
        leaves = [one for one in inputs if one.requires_grad]
        gradients = torch.autograd.grad(outs, leaves, incoming, allow_unused=True)
        return [one.clone() for one in (*outs, *gradients) if one is not None]

    for one in _replays():
        monkeypatch.setattr(one, "_replays", {})
        monkeypatch.setattr(one, "_came", set())
    drawn = [tensors(*case.shapes((6, 40)), dtype=torch.bfloat16) for _ in range(4)]
    again = [results([laid_out(one) for one in inputs]) for inputs in drawn]
    functions = [known for one in _replays() for known, _ in one._replays.values()]
    assert functions
    assert {getattr(known, "__name__", known) for known in functions} == {"replay"}
    for one in _replays():
        monkeypatch.setattr(one, "_replays", {})
        monkeypatch.setattr(one, "_came", set())
    with Watching():
        worked_out = [results([laid_out(one) for one in inputs]) for inputs in drawn]
    for mine, theirs in zip(again, worked_out, strict=True):
        assert all(map(torch.equal, mine, theirs))


@on_kernels
def test_a_mask_is_that_of_the_calls_own_seed() -> None:
    x = torch.randn(6, 40, device=DEVICE)
    masks = [ops.dropout(x, 0.5, seed=seed_of(number), backend="triton") == 0 for number in range(5)]
    for number, mask in enumerate(masks):
        assert torch.equal(mask, ops.dropout(x, 0.5, seed=seed_of(number), backend="eager") == 0)
