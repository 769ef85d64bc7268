"""The classes of transformers made small from their configs, and what `swap` does to each.

python -m tests.components.swap.classes LEVEL [NAME...]    # prints a line of JSON for each class, or for these
python -m tests.components.swap.classes LEVEL --every 4    # for every fourth class
"""

import argparse
import copy
import json
import math
import multiprocessing
import re
import resource
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from multiprocessing.connection import Connection
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from fuselayers.cli.machine import measured_machine
from fuselayers.components.swap import swap
from fuselayers.components.swap.batch import made_batch
from tests.components.swap.layers import without_dropout

transformers = pytest.importorskip("transformers")

LARGEST: Final = 20_000_000  # parameters
SECONDS_OF_SWAP: Final = 60
SECONDS: Final = 150  # for a class, with its model and three training steps
MEMORY: Final = 8 << 30

_DEPTHS: Final = {
    r"(num|n)_(?!feat_).*layers?|(?!num_feat_).*_layers|(.*_)?depth": 2,
    r"depths": 2,
    r".*vocab_size.*": 99,
}
_SIZES: Final[dict[str, Any]] = {
    **_DEPTHS,
    r".*_token_(id|index)": 3,
    r".*(key_value|kv)_heads": 2,
    r"(.*_)?(n|num|attention)_(heads?|.*_heads)": 4,
    r"(.*_)?head_dim|d_kv|dim_head|rotary_dim": 16,
    r"mrope_section": [2, 3, 3],
    r".*(intermediate_size|ffn_dim|mlp_dim)|d_ff|n_inner|ffn_hidden_size": 128,
    r".*(hidden_size|embed_dim|hidden_dim|embedding_size|projection_dim)|d_model|n_embd|dim": 64,
    r".*hidden_sizes|embed_dims|conv_dim": 0.25,
    r".*(num_|routed_|local_)experts": 4,
    r"n_group|topk_group": 1,
    r"(?!index).*(experts_per_tok|top_?k.*|moe_k)": 2,
    r".*lora_rank": 8,
    r"max_position_embeddings|n_positions|max_(source|target)_positions": 64,
}
"""Names in configs and their sizes; a fraction scales the entries of a list."""
_OTHERS: Final[dict[str, Any]] = {
    **_SIZES,
    **{r".*(key_value|kv)_heads": 4, r".*hidden_sizes|embed_dims|conv_dim": 1.0, r"mrope_section": [1, 1, 2]},
}
_DERIVED: Final = ("per_layer_config", "out_features", "out_indices", "stage_names", "_out_features", "_out_indices")
"""Names that a config computes from others."""


def class_names() -> list[str]:
    """The names of all models without a head."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    names = ([value] if isinstance(value, str) else value for value in MODEL_MAPPING_NAMES.values())
    return sorted({name for names_of_config in names for name in names_of_config})


def small_model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a small model of a class and a batch; raise the last error if plain transformers makes or runs none."""
    kind: Any = getattr(transformers, name)
    default = kind.config_class().to_dict()
    problem: Exception | None = None
    for sizes in (_SIZES, _OTHERS, _DEPTHS, {}):
        try:
            config = kind.config_class.from_dict(_shrunk(default, sizes))
            with torch.device("meta"):
                parameters = sum(parameter.numel() for parameter in kind(config).parameters())
            if parameters > LARGEST:
                raise ValueError(f"{parameters} parameters")
            torch.manual_seed(0)
            model = kind(config).train()
            batch = made_batch(model)
            if batch is None and model.main_input_name == "pixel_values":  # of a config without a size
                batch = {"pixel_values": torch.randn(2, 3, 64, 64)}
            if batch is None:
                raise ValueError("no batch is known for its inputs")
            if not all(value.isfinite().all() for value in _step(model, batch, 0).values()):
                raise ValueError("its loss or its gradients are not finite")
            return model, batch
        except Exception as error:
            problem = problem or error
    raise problem or ValueError("no config is small")


def _shrunk(config: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    layers = config.get("num_hidden_layers")
    small: dict[str, Any] = {}
    for name, value in config.items():
        size = next((size for pattern, size in sizes.items() if re.fullmatch(pattern, str(name))), None)
        if name in _DERIVED and sizes:
            continue
        if isinstance(value, dict):
            value = _shrunk(value, sizes)
        elif isinstance(value, (list, tuple)) and value:
            if len(value) == layers and name != "depths":  # a value for each layer
                value = [value[0], value[-1]]
            elif isinstance(size, list):
                value = size
            elif size is not None and all(type(entry) is int for entry in value):
                value = [int(entry * size) if isinstance(size, float) else min(entry, size) for entry in value]
        elif type(value) is int and isinstance(size, int):
            value = min(value, size)
        elif name == "image_size" and isinstance(value, int) and sizes:
            patch = config.get("patch_size")
            value = 4 * patch if isinstance(patch, int) and patch >= 8 else 64
        small[name] = value
    if "rope_theta" in small and "mrope_section" in sizes:  # whose default is in the model's code
        small["mrope_section"] = sizes["mrope_section"]
    return small


def tried(name: str, level: str) -> dict[str, Any]:
    """Swap a small model of a class; return its outcome, the share of bytes that it keeps, and the seconds of `swap`.

    Outcomes: "not run" (by plain transformers), "raised", "nothing" (no site), "wrong", "right".
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        model, batch = small_model(name)
    except Exception as problem:
        return {"outcome": "not run", "why": f"{type(problem).__name__}: {problem}"[:100]}
    once, plain = (without_dropout(copy.deepcopy(model)) for _ in range(2))  # a step changes batch norms
    draws = _step(once, batch, 0)["loss"] != _step(once, batch, 1)["loss"]  # such as masked spans of sound
    wanted = _step(plain.train(not draws), batch, 0)
    started = time.perf_counter()
    try:
        report = swap(model, level=level, batch=batch, backend="eager" if level == "blocks" else "auto")  # type: ignore[arg-type]
        seconds = time.perf_counter() - started
        got = _step(without_dropout(model).train(not draws), batch, 0)
    except Exception as problem:
        return {"outcome": "raised", "why": f"{type(problem).__name__}: {problem}"[:2000]}
    error = _error(wanted, got)
    outcome = "nothing" if not report.sites else "wrong" if error > 1 else "right"
    row: dict[str, Any] = {"outcome": outcome, "seconds": round(seconds, 2)}
    if report.saved_before and report.saved_after is not None:
        row["kept"] = round(report.saved_after / report.saved_before, 3)
    return {**row, "error": round(error, 3), "rules": dict(Counter(site.rule for site in report.sites))}


def _step(model: nn.Module, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return the loss, or a sum of all results with random weights, and the gradients of all parameters."""
    model.zero_grad()
    torch.manual_seed(seed)
    result: Any = model(**batch)
    loss = result.get("loss")
    if loss is None:
        generator = torch.Generator().manual_seed(1)  # the mean square of a layer norm's results would be constant
        parts = (value for value in _floating(result.values()) if value.requires_grad)
        loss = sum((value * torch.randn(value.shape, generator=generator).to(value)).mean() for value in parts)
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **{name: grad.clone() for name, grad in grads.items()}}


def _floating(values: Any) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor) and value.is_floating_point())


def _error(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    """Return the largest difference over what is allowed: 1e-3 of a tensor's, and 1e-5 of all gradients' largest."""
    if wanted.keys() != got.keys():
        return float("inf")
    sizes = {name: value.abs().max().item() for name, value in wanted.items() if value.numel()}
    largest = max((size for name, size in sizes.items() if name != "loss"), default=1.0)
    differences = {name: (got[name] - wanted[name]).abs().max().item() for name in sizes}
    shares = [differences[name] / (1e-3 * size + 1e-5 * largest + 1e-30) for name, size in sizes.items()]
    return max(shares) if all(map(math.isfinite, shares)) else float("inf")


def outcomes(names: Iterable[str], level: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what `tried` returns for each class, from a process of its own; for its end or delay "died" or "late"."""
    forks = multiprocessing.get_context("fork")  # this process computes nothing, so it has no threads to lose
    for name in names:
        reader, writer = forks.Pipe(duplex=False)
        process = forks.Process(target=_send, args=(writer, name, level))
        process.start()
        writer.close()
        try:
            yield name, reader.recv() if reader.poll(SECONDS) else {"outcome": "late"}
        except EOFError:
            yield name, {"outcome": "died"}
        process.kill()
        process.join()


def _send(writer: Connection, name: str, level: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    writer.send(tried(name, level))


def main() -> None:
    """Print the machine, then the outcome of each class."""
    parser = argparse.ArgumentParser(prog="python -m tests.components.swap.classes")
    parser.add_argument("level", choices=("layers", "blocks"))
    parser.add_argument("names", nargs="*", help="of classes (default: all)")
    parser.add_argument("--every", type=int, default=1, help="try each n-th class only (default: 1)")
    chosen = parser.parse_args()
    level, names = chosen.level, (chosen.names or class_names())[:: chosen.every]
    torch.set_num_threads(1)
    machine = f"{measured_machine(torch.device('cpu'))}, transformers {transformers.__version__}"
    print(json.dumps({"machine": machine, "date": date.today().isoformat(), "level": level}), flush=True)
    for name, outcome in outcomes(names, level):
        print(json.dumps({"name": name, **outcome}), flush=True)


if __name__ == "__main__":
    main()
