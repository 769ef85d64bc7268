"""What is written of a swapped model, and what is read into one: files, copies, pickles, ties, other devices."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from fuselayers.components.swap import unswap
from tests.components.swap.levels import (
    FAMILIES,
    assert_same,
    batch_for,
    both_levels,
    bytes_of,
    classes,
    gradients,
    pair,
    swap_at,
)
from tests.processes import run

families = pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])


def own_class(model: nn.Module) -> type:
    kind: type = getattr(type(model), "swapped_from", type(model))
    return kind


@families
@both_levels
def test_pretrained_files_are_those_of_the_plain_model(name: str, level: str, tmp_path: Path) -> None:
    plain, swapped = pair(name, level, train=False)
    for model, folder in ((plain, "plain"), (swapped, "swapped")):
        model.save_pretrained(tmp_path / folder)  # type: ignore[operator]
    files = {one.name: one.read_bytes() for one in (tmp_path / "plain").iterdir()}
    assert {one.name: one.read_bytes() for one in (tmp_path / "swapped").iterdir()} == files
    loaded, details = own_class(swapped).from_pretrained(tmp_path / "swapped", output_loading_info=True)  # type: ignore[attr-defined]
    assert [key for key, value in details.items() if value] == []
    assert bytes_of(loaded) == bytes_of(plain)
    assert classes(loaded) == classes(plain)


@families
@both_levels
def test_the_class_of_a_swapped_model_loads_a_plain_one(name: str, level: str, tmp_path: Path) -> None:
    plain, swapped = pair(name, level, train=False)
    plain.save_pretrained(tmp_path)  # type: ignore[operator]
    batch = batch_for(name)
    wanted = gradients(plain, batch)
    # A causal model's own class is a subclass: it loads, too, and computes the same.
    loaded = type(swapped).from_pretrained(tmp_path).eval()  # type: ignore[attr-defined]
    assert bytes_of(loaded) == bytes_of(plain)
    assert_same(gradients(loaded, batch), wanted)
    swapped.load_state_dict(plain.state_dict(), strict=True)
    assert_same(gradients(swapped, batch), wanted)


@both_levels
def test_copies_pickles_and_saved_models_are_swapped(level: str) -> None:
    _, swapped = pair("gpt2", level)
    batch = batch_for("gpt2")
    wanted = gradients(swapped, batch)
    file = io.BytesIO()
    torch.save(swapped, file)
    file.seek(0)
    for other in (
        copy.deepcopy(swapped),
        pickle.loads(pickle.dumps(swapped)),
        torch.load(file, weights_only=False),
    ):
        assert classes(other) == classes(swapped)
        assert other.lm_head.weight is other.transformer.wte.weight
        assert_same(gradients(other, batch), wanted)
        assert unswap(other) > 0
        assert bytes_of(other) == bytes_of(swapped)


READS = """
import sys, torch
model = torch.load("model.pt", weights_only=False)
batch = torch.load("batch.pt")
swapped = sorted({type(one).__name__ for one in model.modules() if hasattr(type(one), "swapped_from")})
torch.save((swapped, model(**batch).loss.detach(), model(**batch).logits.detach()), "result.pt")
"""


@pytest.mark.slow  # another process imports transformers
@both_levels
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_another_process_reads_it(name: str, level: str, tmp_path: Path) -> None:
    _, swapped = pair(name, level, train=False)
    batch = batch_for(name)
    torch.save(swapped, tmp_path / "model.pt")
    torch.save(batch, tmp_path / "batch.pt")
    done = run(READS, folder=tmp_path)
    assert done.code == 0, done.errors
    kinds, loss, logits = torch.load(tmp_path / "result.pt")
    assert kinds == sorted({type(one).__name__ for one in swapped.modules() if hasattr(type(one), "swapped_from")})
    with torch.no_grad():
        result = swapped(**batch)
    assert torch.equal(loss, result.loss)
    assert torch.equal(logits, result.logits)


@both_levels
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_more_tokens_and_tied_weights(name: str, level: str) -> None:
    plain, swapped = pair(name, level)
    for model in (plain, swapped):
        torch.manual_seed(5)
        model.resize_token_embeddings(120, mean_resizing=False)  # type: ignore[operator]
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        assert embedding.shape[0] == 120
        assert model.get_output_embeddings().weight is embedding  # type: ignore[operator]
    batch = batch_for(name)
    batch["input_ids"][0, 0] = 119
    assert_same(gradients(swapped, batch), gradients(plain, batch))


@both_levels
def test_a_model_without_memory_gets_it_after_swap(level: str) -> None:
    plain, _ = pair("llama", level)
    with torch.device("meta"):
        model = FAMILIES["llama"][0]().train()
    assert swap_at(level, model).sites
    model = model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict(), strict=True)
    for one, other in zip(model.modules(), plain.modules(), strict=True):
        for key, buffer in other.named_buffers(recurse=False):
            one.get_buffer(key).copy_(buffer)  # what no state_dict holds, as the frequencies of rotary embeddings
    batch = batch_for("llama")
    assert_same(gradients(model, batch), gradients(plain, batch))


@both_levels
def test_assigned_parameters_and_dtypes(level: str) -> None:
    plain, swapped = pair("llama", level, train=False)
    batch = batch_for("llama")
    swapped.load_state_dict({key: value.clone() for key, value in plain.state_dict().items()}, assign=True)
    assert_same(gradients(swapped, batch), gradients(plain, batch))
    wanted, got = (gradients(model.to(torch.bfloat16), batch) for model in (plain, swapped))
    for key, value in wanted.items():
        assert got[key].dtype == value.dtype
        largest = value.float().abs().max().item()
        torch.testing.assert_close(got[key].float(), value.float(), atol=0.05 * largest, rtol=0.0)
    assert_same(gradients(swapped.to(torch.float64), batch), gradients(plain.to(torch.float64), batch))
