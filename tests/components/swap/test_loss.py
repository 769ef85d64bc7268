"""The fused loss of a causal language model, which makes no logits."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components.swap import swap
from tests.components.compare import assert_same_values
from tests.components.swap.levels import gradients, pair
from tests.components.swap.models import FAMILIES, batch_for

transformers = pytest.importorskip("transformers")
CausalLMOutputWithPast = transformers.modeling_outputs.CausalLMOutputWithPast


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


class OwnModel(nn.Module):
    """A user's class around a model of transformers; its loss function is an attribute of the instance."""

    def __init__(self) -> None:
        super().__init__()
        of_family = FAMILIES["llama"][0]()
        self.config, self.model, self.lm_head = of_family.config, of_family.model, of_family.lm_head
        self.loss_function = of_family.loss_function

    def forward(
        self, input_ids: Any = None, labels: Any = None, logits_to_keep: int | Tensor = 0, **kwargs: Any
    ) -> Any:
        outputs = self.model(input_ids=input_ids, **kwargs)
        hidden_states = outputs.last_hidden_state
        slice_indices = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, slice_indices, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_loss_function_of_the_instance() -> None:
    plain = OwnModel()
    swapped = copy.deepcopy(plain)
    assert "causal_lm_loss" in {site.rule for site in swap(swapped, level="layers", verify=False).sites}
    batch = batch_for("llama")
    torch.testing.assert_close(swapped(**batch).loss, plain(**batch).loss)


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
