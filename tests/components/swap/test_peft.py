"""LoRA adapters of peft, put on before and after `swap`."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from fuselayers.components.swap import fallbacks, unswap
from tests.components.swap.levels import assert_same, batch_for, both_levels, bytes_of, gradients, pair, swap_at

peft = pytest.importorskip("peft")

TARGETS = {
    "gpt2": ["c_attn", "c_fc", "c_proj"],
    "bert": ["query", "dense"],
    "llama": ["q_proj", "gate_proj", "down_proj"],
}
families = pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(one, marks=pytest.mark.slow) for one in ("gpt2", "bert"))]
)


def with_adapters(model: nn.Module, name: str) -> nn.Module:
    """The model with adapters that compute something: peft begins with zeros."""
    torch.manual_seed(4)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=TARGETS[name], fan_in_fan_out=name == "gpt2"
    )
    adapted: nn.Module = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, one in adapted.named_parameters():
            if "lora_" in key:
                one.normal_(std=0.1)
    return adapted


@families
@both_levels
def test_adapters_put_on_after_swap_have_the_plain_models_gradients(name: str, level: str) -> None:
    plain, swapped = pair(name, level)
    batch = batch_for(name)
    wanted, got = (gradients(with_adapters(model, name), batch) for model in (plain, swapped))
    assert sum("lora_A" in key for key in got) >= 4
    assert_same(got, wanted)


@families
@both_levels
def test_a_model_with_adapters_is_swapped(name: str, level: str) -> None:
    plain, _ = pair(name, level)
    adapted = with_adapters(plain, name)
    batch = batch_for(name)
    wanted, keys = gradients(adapted, batch), list(adapted.state_dict())
    report = swap_at(level, adapted, batch=batch, verify=True)
    assert report.sites
    assert all(skipped.reason.endswith("is a peft.tuners.lora.layer.Linear") for skipped in report.skipped)
    assert_same(gradients(adapted, batch), wanted)
    assert list(adapted.state_dict()) == keys
    before = bytes_of(adapted)
    assert unswap(adapted) == len(report.sites)
    assert bytes_of(adapted) == before
    assert_same(gradients(adapted, batch), wanted)


def test_a_merged_model_is_fused_again_and_an_unloaded_one_has_its_old_weights() -> None:
    plain, swapped = pair("llama", "layers", train=False)
    batch, before = batch_for("llama"), bytes_of(swapped)
    tested = with_adapters(swapped, "llama")
    expected = tested(**batch).logits
    # The adapters are in MLPs and attentions; norms and sums stay fused.
    assert {one.name.rpartition(".")[2] for one in fallbacks(tested)} == {"mlp"}
    unloaded = copy.deepcopy(tested).unload()  # type: ignore[operator]
    assert bytes_of(unloaded) == before
    merged = tested.merge_and_unload()  # type: ignore[operator]
    assert list(merged.state_dict()) == list(plain.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = copy.deepcopy(merged)
        torch.testing.assert_close(again(**batch).logits, expected, atol=1e-5, rtol=1e-5)
    assert fallbacks(again) == (), "a merged layer is plain again"
    assert unswap(merged) > 0
    torch.testing.assert_close(merged(**batch).logits, expected, atol=1e-5, rtol=1e-5)


def test_saved_adapters_go_onto_a_plain_model(tmp_path: Path) -> None:
    plain, swapped = pair("llama", "layers", train=False)
    batch = batch_for("llama")
    adapted = with_adapters(swapped, "llama")
    expected = adapted(**batch).logits
    adapted.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = peft.PeftModel.from_pretrained(plain, tmp_path)
    torch.testing.assert_close(loaded(**batch).logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_compiled_model_with_adapters_has_no_graph_break() -> None:
    _, swapped = pair("llama", "layers", train=False)
    ids = batch_for("llama")["input_ids"]
    adapted = with_adapters(swapped, "llama").base_model.model.model  # type: ignore[union-attr]
    expected = adapted(ids).last_hidden_state  # type: ignore[operator]
    compiled = torch.compile(adapted, backend="eager", fullgraph=True)  # type: ignore[call-overload]
    torch.testing.assert_close(compiled(ids).last_hidden_state, expected)
