"""Training, generating, exporting and saving give the same results with a plain and a swapped model."""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fuselayers.components.swap import fallbacks, unswap
from tests.components.compare import assert_same_values
from tests.components.parallel.ranks import run
from tests.components.swap.levels import both_levels, bytes_of, classes, gradients, pair
from tests.components.swap.models import batch_for

transformers = pytest.importorskip("transformers")

Results = dict[str, torch.Tensor]


def with_other_parameters(model: nn.Module, name: str, _: Path) -> Results:
    parameters = {key: (value.detach() * 1.1).requires_grad_() for key, value in model.named_parameters()}
    loss = torch.func.functional_call(model, parameters, kwargs=batch_for(name)).loss
    assert fallbacks(model) == ()
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {key: value for key, value in zip(parameters, gradients, strict=True) if value is not None}


def gradients_of_each_sample(model: nn.Module, name: str, _: Path) -> Results:
    inner: Any = model.base_model
    parameters = {key: value.detach() for key, value in inner.named_parameters()}
    ids = batch_for(name)["input_ids"][:, None]

    def loss(some: Results, row: torch.Tensor) -> torch.Tensor:
        hidden = torch.func.functional_call(inner, some, (row,), {"use_cache": False}).last_hidden_state
        return hidden.square().mean()

    return torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, ids)


def exported(model: nn.Module, name: str, _: Path, *, strict: bool = False) -> Results:
    # Without labels, and without a cache among the results.
    batch: dict[str, Any] = {key: value for key, value in batch_for(name).items() if key != "labels"}
    batch |= {"use_cache": False} if name in ("llama", "gpt2") else {}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        program = torch.export.export(model.eval(), (), batch, strict=strict)
        return {**program.state_dict, "logits": program.module()(**batch).logits}


def generated(model: nn.Module, name: str, _: Path, **options: Any) -> Results:
    """The tokens after prompts of two lengths, and the logits of each step."""
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4])
    counters.clear()
    torch.manual_seed(3)
    fixed = {"max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
    ids = batch_for(name)["input_ids"][:, :7] * mask
    made: Any = model.eval().generate(ids, attention_mask=mask, **fixed, **options)
    assert counters["stats"]["unique_graphs"] == 0, "without gradients nothing is compiled"
    return {"tokens": made.sequences, "logits": torch.stack(made.logits)}


def with_trainer(model: nn.Module, name: str, folder: Path, **options: Any) -> Results:
    """The losses of all steps, then the norms of the gradients, then the loss of the evaluation."""
    pytest.importorskip("accelerate")
    ids = torch.randint(3, 99, (16, 12), generator=torch.Generator().manual_seed(2))
    rows = [{"input_ids": row, "labels": row.clone()} for row in ids]
    fixed = {"per_device_train_batch_size": 2, "learning_rate": 1e-3, "seed": 1, "logging_steps": 1, "max_steps": 4}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(folder), **fixed, **quiet, **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    values = [entry[key] for key in ("loss", "grad_norm") for entry in steps] + [trainer.evaluate()["eval_loss"]]
    return {"curve": torch.tensor(values)}


def with_accelerate(model: nn.Module, name: str, _: Path) -> Results:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _step in range(4):
        with accelerator.accumulate(prepared):
            loss = prepared(**batch_for(name)).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
    return {"losses": torch.stack(losses)}


def saved_as_files(model: nn.Module, name: str, folder: Path) -> Results:
    """The bytes of the files, and the gradients of a model that is loaded from them."""
    model.save_pretrained(folder)
    own = getattr(type(model), "swapped_from", type(model))
    loaded, details = own.from_pretrained(folder, output_loading_info=True)
    assert [key for key, value in details.items() if value] == []
    assert bytes_of(loaded) == bytes_of(model)
    files = {file.name: torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8) for file in folder.iterdir()}
    # The class of a swapped causal model is a subclass, which loads too.
    other = type(model).from_pretrained(folder)
    return {**files, **gradients(other, batch_for(name))}


def swapped_classes(model: nn.Module) -> list[str]:
    return sorted({type(part).__qualname__ for part in model.modules() if hasattr(type(part), "swapped_from")})


def loaded(file: Path, name: str) -> tuple[list[str], Results]:
    model = torch.load(file, weights_only=False)
    return swapped_classes(model), gradients(model, batch_for(name))


def in_another_process(model: nn.Module, name: str, folder: Path) -> Results:
    folder.mkdir()
    torch.save(model, folder / "model.pt")
    ((kinds, results),) = run(1, loaded, folder / "model.pt", name, folder=folder)
    assert kinds == swapped_classes(model)
    return results


QUICK: dict[str, Callable[..., Results]] = {
    "other parameters": with_other_parameters,
    "each sample": gradients_of_each_sample,
    "exported": exported,
    "greedy": functools.partial(generated, do_sample=False),
    "static cache": functools.partial(generated, do_sample=False, cache_implementation="static", disable_compile=True),
    "trainer, checkpoints": functools.partial(with_trainer, gradient_checkpointing=True),
    "accelerate": with_accelerate,
    "files": saved_as_files,
}
SLOW: dict[str, Callable[..., Results]] = {
    "exported, strict": functools.partial(exported, strict=True),
    "without a cache": functools.partial(generated, do_sample=False, use_cache=False),
    "beams": functools.partial(generated, do_sample=False, num_beams=3),
    "samples": functools.partial(generated, do_sample=True, top_k=20),
    "trainer, reentrant checkpoints": functools.partial(
        with_trainer, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True}
    ),
    "trainer, accumulation": functools.partial(with_trainer, gradient_accumulation_steps=2, max_grad_norm=0.1),
    "trainer, label smoothing": functools.partial(with_trainer, label_smoothing_factor=0.1),
    "another process": in_another_process,
}
NOT_FOR = {
    "bert": ("greedy", "static cache", "without a cache", "beams", "samples", "each sample"),
    "gpt2": ("each sample",),  # its masks read values
    "llama": (),
}


# One family and the quick uses run every day. GPT-2 has dropout layers and ties, BERT no cache and post norms.
@both_levels
@pytest.mark.parametrize(
    ("name", "use"),
    [
        pytest.param(name, use, marks=() if name == "llama" and use in QUICK else pytest.mark.slow)
        for name, unfit in NOT_FOR.items()
        for use in (*QUICK, *SLOW)
        if use not in unfit
    ],
)
def test_the_same_results(name: str, use: str, level: str, tmp_path: Path) -> None:
    plain, swapped = pair(name, level)
    results = {**QUICK, **SLOW}[use]
    assert_same_values(results(plain, name, tmp_path / "plain"), results(swapped, name, tmp_path / "swapped"))
    before = bytes_of(swapped)
    assert unswap(swapped) > 0
    assert bytes_of(swapped) == before
    assert classes(swapped) == classes(plain)


@pytest.mark.slow
@both_levels
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_compiling_breaks_no_graph_more_than_before(name: str, level: str) -> None:
    def breaks(model: nn.Module) -> tuple[int, int]:
        torch.compiler.reset()
        explained = torch._dynamo.explain(model)(**batch_for(name))
        return explained.graph_break_count, explained.graph_count

    before, after = (breaks(model) for model in pair(name, level))
    assert after[0] <= before[0]
    assert after[1] <= before[1]


@pytest.mark.slow
@pytest.mark.timeout(900)  # on a busy machine
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5", "opt", "bloom"])
def test_a_model_compiled_by_inductor_computes_the_same(name: str) -> None:
    plain, swapped = pair(name, "layers")
    swapped.compile()
    assert_same_values(gradients(plain, batch_for(name)), gradients(swapped, batch_for(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_ragged_batches_are_compiled_once_more(name: str) -> None:
    _, swapped = pair(name, "blocks")
    graphs = []
    for rows, tokens in ((2, 12), (3, 7), (5, 19), (2, 31), (7, 13), (4, 8)):
        ids = torch.randint(3, 99, (rows, tokens))
        mask = (torch.arange(tokens) < torch.randint(2, tokens + 1, (rows, 1))).long()
        counters.clear()
        gradients(swapped, {"input_ids": ids, "labels": ids, "attention_mask": mask})
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[1] <= graphs[0], graphs
    assert sum(graphs[2:]) == 0, graphs
