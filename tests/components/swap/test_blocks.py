import copy
import pickle

import pytest
import torch
from torch._dynamo.utils import counters

from fuselayers.components.swap import swap, unswap
from fuselayers.partition import saved_bytes
from tests.components.swap.models import FAMILIES, batch_for, loss_of


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("llama", 0.62),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("gpt2", 0.45), ("bert", 0.66), ("vit", 0.7))),
    ],
)
def test_blocks_share_a_graph_and_save_less(name: str, most: float) -> None:
    model, batch = FAMILIES[name][0]().train(), batch_for(name)
    before = saved_bytes(model, **batch)
    model.eval()
    expected = loss_of(model, batch)
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    report = swap(model, level="blocks", batch=batch)
    blocks = [site for site in report.sites if site.rules == ("block",)]
    assert len(blocks) == 2
    assert report.skipped == ()
    loss = loss_of(model, batch)
    torch.testing.assert_close(loss, expected)
    got = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    for one, wanted in zip(got, gradients, strict=True):
        torch.testing.assert_close(one, wanted, atol=1e-6, rtol=1e-3)
    assert saved_bytes(model.train(), **batch) <= most * before
    if name != "vit":
        counters.clear()
        loss_of(model, batch_for(name, tokens=7)).backward()
        assert counters["stats"]["unique_graphs"] == 0, "another length is compiled again"
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(one) for one in other.modules()] == [type(one) for one in model.modules()]
    unswap(model)
    torch.testing.assert_close(loss_of(model.eval(), batch), expected)


def test_generate_runs_the_blocks_own_forward() -> None:
    model, batch = FAMILIES["llama"][0]().eval(), batch_for("llama")
    tokens = model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    swap(model, level="blocks", verify=False)
    counters.clear()
    again = model.generate(batch["input_ids"], max_new_tokens=5, do_sample=False)  # type: ignore[operator]
    assert torch.equal(tokens, again)
    assert counters["stats"]["unique_graphs"] == 0


@pytest.mark.slow
def test_blocks_pass_the_verification_with_many_rows() -> None:
    model = FAMILIES["gpt2"][0]()
    ids = torch.randint(3, 99, (16, 128))
    report = swap(model, level="blocks", batch={"input_ids": ids, "labels": ids})
    assert report.skipped == ()
    assert [site.rules for site in report.sites].count(("block",)) == 2
