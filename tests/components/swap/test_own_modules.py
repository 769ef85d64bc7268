"""Modules of a user's own, which do what the models of transformers do not."""

import copy
import pickle
import threading
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.components.swap import swap


class OwnMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))  # type: ignore[no-any-return]


class InPlace(OwnMLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        doubled = h.mul_(2)  # noqa: F841
        return self.down(self.act(h))  # type: ignore[no-any-return]


class Unread(OwnMLP):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        kept = self.seen.append(h)  # noqa: F841
        return self.down(self.act(h))  # type: ignore[no-any-return]


class WithLock(OwnMLP):
    def __init__(self) -> None:
        super().__init__()
        self.lock: Any = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}


class OwnAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        p = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(query=x, key=x, value=x, dropout_p=p)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = OwnMLP()

    def forward(self, x: Tensor, use_cache: bool = True) -> Tensor:
        y: Tensor = self.mlp(x)
        return 2 * y if use_cache else y


class Counting(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.mlp = OwnMLP()
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.mlp(x)  # type: ignore[no-any-return]


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def test_a_penalty_on_a_gradient() -> None:
    def gradients(module: nn.Module) -> list[Tensor]:
        x = X.clone().requires_grad_()
        (first,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        parameters = [value for name, value in module.named_parameters() if name != "down.bias"]
        return list(torch.autograd.grad(first.square().sum(), (x, *parameters), allow_unused=True))

    plain = OwnMLP()
    swapped = copy.deepcopy(plain)
    assert swap(swapped, level="layers", batch=X).sites
    for got, wanted in zip(gradients(swapped), gradients(plain), strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("kind", "why"),
    [(InPlace, "calls mul_, which writes into a tensor"), (Unread, "computes kept and does not use it")],
)
def test_a_forward_with_effects_is_left_alone(kind: type[OwnMLP], why: str) -> None:
    module = kind()
    wanted = module(X)
    with pytest.warns(UserWarning, match="found nothing"):
        report = swap(module, level="layers", verify=False)
    assert report.sites == ()
    assert why in " ".join(str(report).split())
    torch.testing.assert_close(module(X), wanted)


def test_only_models_of_transformers_run_without_a_cache() -> None:
    module = Doubled().train()
    wanted = module(X)
    swap(module, level="layers", batch=X)
    torch.testing.assert_close(module(X), wanted)


def test_buffers_that_forward_assigns_are_put_back() -> None:
    module = Counting()
    swap(module, level="layers", batch=X)
    assert module.calls == 0


def test_a_class_says_what_is_pickled() -> None:
    module = WithLock()
    swap(module, level="layers", batch=X)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(copied(X), module(X))
        assert not hasattr(copied, "lock")


def test_attention_by_the_names_of_its_arguments() -> None:
    x = torch.randn(1, 2, 5, 4)
    module = OwnAttention()
    wanted = module.eval()(x)
    assert swap(module, level="layers", verify=False).sites
    torch.testing.assert_close(module(x), wanted)
    assert module.train()(x).isfinite().all()


def test_a_model_on_the_meta_device_is_not_verified() -> None:
    with torch.device("meta"):
        module = OwnMLP()
    report = swap(module, level="layers", batch=X.to("meta"))
    assert [site.rule for site in report.sites] == ["mlp"]
    assert report.notes == ("not verified: its parameters are on the meta device; give it values",)


def test_linear_layers_in_a_list_are_no_blocks() -> None:
    heads = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert swap(heads, level="blocks", batch=X).sites == ()


def test_a_scripted_child_is_left_alone() -> None:
    module = nn.Sequential(OwnMLP(), torch.jit.script(nn.Linear(8, 8)))
    wanted = module(X)
    assert [site.name for site in swap(module, level="layers", batch=X).sites] == ["0"]
    torch.testing.assert_close(module(X), wanted)
