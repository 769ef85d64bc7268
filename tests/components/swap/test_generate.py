"""`generate` of a swapped model: the tokens of the plain one, and nothing compiled again."""

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fuselayers.components.swap import swap, unswap
from tests.components.swap.levels import FAMILIES, both_levels, gradients, pair

transformers = pytest.importorskip("transformers")

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "beams": {"do_sample": False, "num_beams": 3},
    "samples": {"do_sample": True, "top_k": 20},
}


def generated(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: Any) -> dict[str, torch.Tensor]:
    """The tokens, and the logits of each step."""
    torch.manual_seed(3)
    fixed = {"max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    made: Any = model.generate(ids, attention_mask=mask, **fixed, **options)  # type: ignore[operator]
    return {"tokens": made.sequences, "logits": torch.stack(made.logits)}


def assert_generated(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert torch.equal(got["tokens"], wanted["tokens"])
    torch.testing.assert_close(got["logits"], wanted["logits"], atol=1e-5, rtol=1e-5)


def prompts(*lengths: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of prompts, padded on the left, and its mask."""
    most = max(lengths)
    mask = torch.stack([(torch.arange(most) >= most - one).long() for one in lengths])
    ids = torch.randint(3, 99, mask.shape, generator=torch.Generator().manual_seed(6))
    return ids * mask, mask


@both_levels
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_the_same_tokens(name: str, way: str, level: str) -> None:
    plain, swapped = pair(name, level, train=False)
    ids, mask = prompts(7, 4)
    wanted = generated(plain, ids, mask, **WAYS[way])
    counters.clear()
    assert_generated(generated(swapped, ids, mask, **WAYS[way]), wanted)
    assert counters["stats"]["unique_graphs"] == 0, "without gradients nothing is compiled"
    unswap(swapped)
    assert_generated(generated(swapped, ids, mask, **WAYS[way]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_ragged_batches_are_not_compiled_again(name: str) -> None:
    _, swapped = pair(name, "blocks")
    sizes = [(2, 12), (3, 7), (5, 19), (2, 31), (7, 13), (4, 8)]
    graphs = []
    for rows, tokens in sizes:
        ids = torch.randint(3, 99, (rows, tokens))
        mask = (torch.arange(tokens) < torch.randint(2, tokens + 1, (rows, 1))).long()
        counters.clear()
        gradients(swapped, {"input_ids": ids, "labels": ids, "attention_mask": mask})
        graphs.append(counters["stats"]["unique_graphs"])
    assert sum(graphs[1:]) == 0, graphs


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_with_gradients_a_growing_cache_is_compiled_a_bounded_number_of_times(name: str) -> None:
    """Decoding step by step with gradients, as reinforcement learning may: no compilation for each length."""
    plain, swapped = pair(name, "blocks")
    ids, _ = prompts(7, 7)

    def decode(model: nn.Module) -> tuple[torch.Tensor, list[int]]:
        cache = transformers.DynamicCache(config=model.config)
        model.eval()
        logits, graphs = [], []
        pieces = [ids[:, :4], *ids[:, 4:].split(1, dim=1), *ids.split(1, dim=1)]
        for piece in pieces:
            counters.clear()
            logits.append(model(input_ids=piece, past_key_values=cache, use_cache=True).logits)
            graphs.append(counters["stats"]["unique_graphs"])
        return torch.cat(logits, dim=1), graphs

    wanted, _ = decode(plain)
    got, graphs = decode(swapped)
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-4)
    assert sum(graphs[3:]) == 0, graphs


def test_a_model_that_is_swapped_between_two_calls_of_generate() -> None:
    model = FAMILIES["llama"][0]().eval()
    ids, mask = prompts(5, 9)
    first = generated(model, ids, mask, do_sample=False)
    swap(model, level="layers", batch={"input_ids": ids, "attention_mask": mask})
    assert_generated(generated(model, ids, mask, do_sample=False), first)
