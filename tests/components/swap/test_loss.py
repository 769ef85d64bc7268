"""The fused loss of a causal language model, which makes no logits."""

import pytest
import torch
from torch import nn

from fuselayers.components.swap import swap
from tests.components.compare import assert_same_values
from tests.components.swap.levels import gradients, pair
from tests.components.swap.models import FAMILIES, batch_for

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "opt", "stablelm", "gpt_neox"])
def test_the_loss_in_training_makes_no_logits(name: str) -> None:
    plain, swapped = pair(name, "layers")
    batch = batch_for(name)
    assert swapped(**batch).logits is None
    assert_same_values(gradients(plain, batch), gradients(swapped, batch))
    counted = {**batch, "num_items_in_batch": torch.tensor(11)}
    torch.testing.assert_close(swapped(**counted).loss, plain(**counted).loss)


def test_where_logits_are_wanted_the_models_own_forward_runs() -> None:
    plain, swapped = pair("llama", "layers")
    batch = batch_for("llama")
    ids = {"input_ids": batch["input_ids"]}
    for call in (ids, {**ids, "logits_to_keep": 2}):
        torch.testing.assert_close(swapped(**call).logits, plain(**call).logits)
    got, wanted = (model(**batch, return_dict=False) for model in (swapped, plain))
    torch.testing.assert_close(got[:2], wanted[:2])
    assert swapped.eval()(**batch).logits is not None


def test_another_loss_function_is_called() -> None:
    plain, swapped = pair("llama", "layers")
    for model in (plain, swapped):
        model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum()
    batch = batch_for("llama")
    torch.testing.assert_close(swapped(**batch).loss, plain(**batch).loss)


@pytest.mark.parametrize("name", ["gemma2", "cohere", "bert"])
def test_a_forward_that_does_more_with_its_logits_keeps_its_loss(name: str) -> None:
    report = swap(FAMILIES[name][0](), level="layers", verify=False)
    assert "causal_lm_loss" not in {site.rule for site in report.sites}


def test_the_search_reads_no_loss_function_without_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers warns if the inner model, which has no head, is asked for it."""

    def asked(model: nn.Module) -> None:
        raise AssertionError(type(model))

    monkeypatch.setattr(transformers.LlamaModel, "loss_function", property(asked), raising=False)
    report = swap(FAMILIES["llama"][0](), level="layers", verify=False)
    assert "causal_lm_loss" in {site.rule for site in report.sites}


def test_labels_of_a_wrong_length() -> None:
    _, swapped = pair("llama", "layers")
    ids = batch_for("llama")["input_ids"]
    with pytest.raises(ValueError, match=r"labels must have one entry per token, \[2, 12\], got \[2, 11\]"):
        swapped(input_ids=ids, labels=ids[:, 1:])


def test_a_head_with_a_hook_is_called() -> None:
    _, swapped = pair("llama", "layers")
    called = []
    head: nn.Module = swapped.lm_head
    head.register_forward_hook(lambda *_: called.append(1))
    assert swapped(**batch_for("llama")).logits is not None
    assert called == [1]
