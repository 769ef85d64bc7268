"""A vision transformer of timm: the extra `timm` brings it."""

import copy
import pickle

import pytest
import torch
from torch import nn

from fuselayers.components.swap import swap, unswap
from fuselayers.partition import saved_bytes
from tests.components.swap.levels import both_levels, bytes_of, classes, swap_at

timm = pytest.importorskip("timm", exc_type=ImportError)


def vit(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", **sizes, proj_drop_rate=dropout, drop_rate=dropout)
    return model


IMAGES = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))
KINDS = torch.tensor([0, 4, 2])


def loss_of(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(IMAGES), KINDS)


@both_levels
def test_it_is_found_verified_and_given_back(level: str) -> None:
    model = vit(0.1).eval()
    keys, parameters, kinds, before = (
        list(model.state_dict()),
        list(model.parameters()),
        classes(model),
        bytes_of(model),
    )
    wanted = torch.autograd.grad(loss_of(model), parameters)
    report = swap_at(level, model, batch=IMAGES, verify=True)
    assert report.skipped == ()
    found = {site.name: site.rule for site in report.sites}
    blocks = ["blocks.0", "blocks.1"]
    if level == "layers":
        assert [found[f"{name}.mlp"] for name in blocks] == ["mlp"] * 2
    else:
        assert [found[name] for name in blocks] == ["block"] * 2
    # The dropout of an attention is never called: torch's attention drops.
    assert all(site.error is not None for site in report.sites if "attn" not in site.name)
    assert list(model.state_dict()) == keys
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert [one.__name__ for one in classes(model)] == [one.__name__ for one in kinds]
    got = torch.autograd.grad(loss_of(model), parameters)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)
    for other_model in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert classes(other_model) == classes(model)
    assert unswap(model) == len(report.sites)
    assert classes(model) == kinds
    assert bytes_of(model) == before


@both_levels
def test_thirty_steps(level: str) -> None:
    curves = []
    for swapped in (False, True):
        model = vit().train()
        if swapped:
            swap_at(level, model)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5), []
        for _ in range(30):
            loss = loss_of(model)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        curves.append(torch.stack(losses))
    torch.testing.assert_close(curves[1], curves[0], atol=1e-6, rtol=2e-5)
    assert curves[0][-1] < curves[0][0]


def test_fewer_bytes_are_saved_with_dropout() -> None:
    model = vit(0.1).train()
    before = saved_bytes(model, IMAGES)
    assert swap(model, level="layers", verify=False).sites
    assert saved_bytes(model, IMAGES) <= 0.8 * before
