"""`swap`: the modules it finds and replaces, its report, and `unswap`."""

import copy
import pickle
import re
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components.swap import RULES, Rule, fallbacks, swap, unswap
from fuselayers.partition import fuse
from tests.components.adapter import Adapter
from tests.components.swap.layers import LAYERS, Feedforward, layer
from tests.components.swap.levels import classes


class NamedDifferently(Feedforward):
    def forward(s, x: Tensor) -> Tensor:
        y = s.act(s.up(x))
        return s.down(y)


class WithAFlag(Feedforward):
    def forward(self, x: Tensor, /, *, flag: bool = True) -> Tensor:
        return self.down(self.act(self.up(x)))


class WithMore(Feedforward):
    def forward(self, x: Tensor, **flags: bool) -> Tensor:
        return self.down(self.act(self.up(x)))


class Looping(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.down(self.act(self.up(x)))
        return x


class Twice(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.down(self.act(self.up(x)))


class Decorated(Feedforward):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class OfTensor(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.Tensor.relu(self.up(x)))


class Recursive(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.again(self.up(x)))

    def again(self, x: Tensor) -> Tensor:
        return self.other(x)

    def other(self, x: Tensor) -> Tensor:
        return self.again(x)


class InPlace(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        doubled = h.mul_(2)  # noqa: F841
        return self.down(self.act(h))


class Unread(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        kept = self.act.seen.append(h)  # noqa: F841
        return self.down(self.act(h))


class Registered(Feedforward):
    """A subclass without a name raises."""

    def __init_subclass__(cls, *, name: str) -> None:
        cls.name = name


class Fused(Feedforward):
    @fuse(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@pytest.mark.parametrize("kind", [Feedforward, NamedDifferently, WithAFlag, WithMore])
def test_names_of_variables_and_unread_arguments_do_not_matter(kind: Any) -> None:
    model, x = kind(), torch.randn(3, 8)
    wanted = model(x)
    report = swap(model, level="layers", batch=x)
    assert [(site.name, site.rule) for site in report.sites] == [("", "mlp")]
    assert report.saved_after < report.saved_before
    torch.testing.assert_close(model(x), wanted)
    if kind in (WithAFlag, WithMore):
        torch.testing.assert_close(model(x, flag=False), wanted)
    else:
        torch.testing.assert_close(model(x=x), wanted)
    assert fallbacks(model) == ()


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Looping, "its forward has an unsupported statement (For)"),
        (Twice, "no rule matches its forward"),
        (Decorated, "its forward is decorated by context_decorator"),
        (Fused, "its forward is decorated by FusedFunction"),
        (OfTensor, "its forward names torch.Tensor.relu, whose module is unknown"),
        (InPlace, "its forward calls mul_, which writes into a tensor"),
        (Unread, "its forward computes kept and does not use it"),
        (Recursive, "its forward calls again recursively, or with arguments that cannot be read"),
    ],
)
def test_a_swap_that_finds_nothing_says_why(kind: Any, reason: str) -> None:
    model = kind()
    with pytest.warns(UserWarning, match=f"swap changed nothing in {kind.__name__}\n") as said:
        report = swap(model, verify=False)
    assert report.sites == ()
    assert [skipped.reason for skipped in report.skipped] == [reason]
    assert reason in " ".join(str(said[0].message).split())
    assert type(model) is kind


def test_a_class_that_acts_on_its_subclasses_is_left_alone() -> None:
    with pytest.warns(UserWarning, match="swap changed nothing"):
        report = swap(Registered(), verify=False)
    assert report.skipped[0].reason == "its class has an __init_subclass__"


def test_an_activation_with_parameters_is_no_part_of_a_rule() -> None:
    activations = pytest.importorskip("transformers.activations")
    model = nn.ModuleList([Feedforward(), Feedforward(), Feedforward()])
    for module, size in zip(model, (1, 4), strict=False):
        module.act = activations.XIELUActivation()
        for name, parameter in module.act.named_parameters():
            setattr(module.act, name, nn.Parameter(torch.zeros(size, dtype=parameter.dtype)))
    assert [site.name for site in swap(model, level="layers", verify=False).sites] == ["2"]


def test_a_part_of_another_class_is_named() -> None:
    model = nn.ModuleList([Feedforward(), Feedforward()])
    model[1].up = Adapter(model[1].up)
    report = swap(model, level="layers", verify=False)
    assert [site.name for site in report.sites] == ["0"]
    assert [(skipped.name, skipped.reason) for skipped in report.skipped] == [
        ("1", "up is a tests.components.adapter.Adapter")
    ]


@pytest.mark.parametrize("level", ["layers", "blocks"])
def test_a_class_that_was_patched_since_is_read_again(level: Any) -> None:
    class Patched(Feedforward):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Tanh()

    def patch(self: Any, x: Tensor) -> Tensor:
        return self.down(self.other(self.up(x)))

    model, x = nn.Sequential(Patched(), Patched()), torch.randn(3, 8)
    swap(model, level=level, backend="eager", verify=False)
    unswap(model)
    Patched.forward = patch
    wanted = model(x)
    assert len(swap(model, level=level, backend="eager", verify=False).sites) == 2
    torch.testing.assert_close(model(x), wanted)


def test_require() -> None:
    report = swap(nn.ModuleList([Feedforward(), Feedforward()]), level="layers", verify=False)
    report.require("mlp", at_least=2)
    with pytest.raises(ValueError, match=r"found 2 modules for 'mlp', at least 3 are required; .* rules: mlp"):
        report.require("mlp", at_least=3)
    with pytest.raises(ValueError, match="found 0 modules for 'block', at least 1 are required"):
        report.require("block")


@pytest.mark.parametrize("name", LAYERS)
def test_modules_stay_the_same_and_come_back(name: str) -> None:
    model = layer(name)
    keys, parameters, kinds = list(model.state_dict()), list(model.parameters()), classes(model)
    report = swap(model, level="layers", verify=False)
    assert list(model.state_dict()) == keys
    assert all(parameter is other for parameter, other in zip(model.parameters(), parameters, strict=True))
    assert [kind.__name__ for kind in classes(model)] == [kind.__name__ for kind in kinds]
    assert isinstance(model, kinds[0])
    # pickle finds the classes and functions of a swapped model by their names.
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(other) == classes(model)
    assert unswap(model) == len(report.sites)
    assert classes(model) == kinds


def test_where_chooses_by_name() -> None:
    model = nn.ModuleDict({"one": Feedforward(), "two": Feedforward()})
    report = swap(model, "tw*", level="layers", verify=False)
    assert [site.name for site in report.sites] == ["two"]
    with pytest.warns(UserWarning, match=r"changed nothing in Feedforward\nno module matches where='nothing\.\*'"):
        swap(model["one"], "nothing.*", verify=False)


def doubled(self: Any, x: Tensor, flag: bool = False) -> Tensor:
    return 2 * self.down(self.act(self.up(x)))


def added(self: Any, *, x: Tensor, first: nn.Module, second: nn.Module) -> Tensor:
    return second(first(x)) + x


def test_custom_rules_replace_modules() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(self.a(x))
            return x + y

    of_class = Rule("doubled", of=Twice, forward=doubled)
    of_form = Rule("added", of=("def forward(self, x): return x + self.second(self.first(x))",), forward=added)
    model, x = nn.Sequential(Twice(), Residual()), torch.randn(3, 8)
    wanted = model(x)
    report = swap(model, level="layers", rules=[of_class, of_form, *RULES], batch=x)
    assert [(site.name, site.rule) for site in report.sites] == [("0", "doubled"), ("1", "added")]
    torch.testing.assert_close(model(x), wanted)


def raising(self: Any, x: Tensor) -> Tensor:
    if self.training:
        raise RuntimeError("no seed on this device")
    return self.down(self.act(self.up(x)))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [(doubled, "its error is "), (raising, "in training it raises RuntimeError: no seed on this device")],
)
def test_a_rule_that_fails_the_verification_is_skipped(forward: Any, reason: str) -> None:
    rule = Rule("wrong", of=Feedforward, forward=forward)
    with pytest.warns(UserWarning, match="changed nothing"):
        report = swap(Feedforward(), level="layers", rules=[rule], batch=torch.randn(3, 8))
    assert report.skipped[0].reason.startswith(reason)


def holding(self: Any, x: Tensor) -> Tensor:
    class Holding(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> Tensor:
            ctx.closure = lambda: y.sum() + y.numel()
            return y.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Tensor:
            return dy

    hidden = self.act(self.up(x)) * 1.0
    return self.down(Holding.apply(hidden))


def test_the_report_counts_what_a_closure_holds() -> None:
    x = torch.randn(5, 8)
    report = swap(Feedforward(), level="layers", rules=[Rule("r", of=Feedforward, forward=holding)], batch=x)
    assert report.held_after == 5 * 16 * 4
    text = " ".join(str(report).split())
    assert "320 B of them would stay under gradient checkpointing and offloading" in text
    report = swap(Feedforward(), level="layers", batch=x)
    assert report.held_after == 0


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="swap takes a module, got Tensor"):
        swap(torch.ones(2))
    model = Feedforward()
    for batch in (torch.ones(2, 8), {"x": torch.ones(2, 8)}):
        kind = type(batch).__name__
        with pytest.raises(
            TypeError, match=f"where takes patterns of names, got {kind}; arguments of the model go to batch="
        ):
            swap(model, batch)
    with pytest.raises(ValueError, match="no level 'layer'"):
        swap(model, level="layer")
    # Both are checked too if the model has no repeated blocks and needs neither.
    with pytest.raises(ValueError, match="no compression 'int9'; did you mean 'int8'"):
        swap(model, level="blocks", compress="int9")
    with pytest.raises(ValueError, match="no backend 'nosuch'; there are: auto, eager"):
        swap(model, level="blocks", backend="nosuch")
    swap(model, verify=False)
    with pytest.raises(ValueError, match=r"already swapped; call unswap\(model\) first"):
        swap(model)


class WithoutBatch(Feedforward):
    main_input_name = ("no", "name")
    config = SimpleNamespace()


class WithWrongBatch(Feedforward):
    """Its config gives a batch on which it does not run."""

    main_input_name = "pixel_values"
    config = SimpleNamespace(image_size=16)


class NotCalled(Feedforward):
    """A model with a part that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.other = Feedforward()


class WithLock(Feedforward):
    """It cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class WithoutTraining(Feedforward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise RuntimeError("it is frozen")
        return super().train(mode)


X = torch.randn(4, 8)


# Each reason not to verify a module.
@pytest.mark.parametrize(
    ("make", "name", "batch", "why"),
    [
        (WithoutBatch, "", None, "there is no batch, and none could be made"),
        (WithWrongBatch, "", None, r"the model does not run on a batch made from its config \(.*\)"),
        (NotCalled, "other", X, "the model does not call it on this batch"),
        (WithLock, "", X, "it cannot be copied: TypeError: cannot pickle .*"),
        (Feedforward, "", torch.full((4, 8), torch.nan), "the original's results are not finite on this batch"),
        (WithoutTraining, "", X, "in training the original raises RuntimeError: it is frozen"),
    ],
)
def test_what_cannot_be_verified_is_swapped_only_if_asked_and_the_report_says_why(
    make: type[nn.Module], name: str, batch: Any, why: str
) -> None:
    model: Any = make().eval()
    before = type(model.get_submodule(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # nothing else may be swapped
        report = swap(model, level="layers", batch=batch)
    assert type(model.get_submodule(name)) is before
    (skipped,) = (skipped for skipped in report.skipped if skipped.name == name)
    assert re.fullmatch(f"not verified: {why}", skipped.reason)
    assert "verify='if_possible'" in str(report)
    unswap(model)
    report = swap(model, level="layers", batch=batch, verify="if_possible")
    assert name in [site.name for site in report.sites]
    assert re.search(f"not verified: .*{why}", " ".join(str(report).split()))


def test_a_module_that_is_not_called_is_verified_by_one_of_its_class_and_sizes() -> None:
    report = swap(nn.Sequential(NotCalled(), Feedforward()), level="layers", batch=X)
    assert report.skipped == ()
    assert [site.name for site in report.sites if site.error is not None] == ["0", "0.other", "1"]
