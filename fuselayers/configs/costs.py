"""costs -- a model's parameters, its arithmetic, and its memory between forward and backward.

The model is built on the meta device and called with fake tensors, so nothing is computed or allocated.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from .._torch.dispatch import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from ..partition.inspect.saved_bytes import saved_by_call
from .build import Source, build, compose
from .sections import Config


@dataclass(frozen=True)
class ModelCosts:
    """The costs of training one example without fusion. An example is a sequence as long as the model's context.

    The example of an encoder_decoder is two such sequences, a source and a target.

    FLOPs are those of matrix products, convolutions and attention, as torch's FlopCounterMode counts them: two for a
    multiplication and its addition. Attention is counted as if every token attended to all tokens, causal or not. Its
    backward is counted without the work that some kernels recompute.

    Attributes:
        parameters: the number of parameters; tied ones count once.
        embedding_parameters: the number of those in lookup tables, `nn.Embedding`.
        tokens: the length of a sequence, the model's `context_length`.
        forward_flops: FLOPs of forward for an example.
        backward_flops: FLOPs of backward for an example.
        float32_bytes: bytes that eager mode saves for backward of an example, without the weights, if weights and
            activations are float32.
        bfloat16_bytes: the same in bfloat16.
    """

    parameters: int
    embedding_parameters: int
    tokens: int
    forward_flops: int
    backward_flops: int
    float32_bytes: int
    bfloat16_bytes: int


@torch.inference_mode(False)
@torch.enable_grad()
def model_costs(source: Source = "gpt_nano", overrides: Sequence[str] = ()) -> ModelCosts:
    """Return the costs of a config's model, trained in eager mode on a CPU.

    On a GPU about as much is saved, depending on torch's attention kernel. `fuselayers.explain` shows the bytes that a
    fused model saves.

    Args:
        source: as for `build`; the section `fusion` has no effect.
        overrides: as for `build`.

    Raises:
        TypeError, OSError, ValueError: as `build`; or the model has no `example_inputs`, or its computation depends on
            values, which fake tensors do not have.

    >>> costs = model_costs("gpt2_small")
    >>> costs.parameters, costs.tokens
    (124439808, 1024)
    >>> f"{costs.forward_flops / costs.tokens / 1e6:.0f} MFLOP per token"
    '285 MFLOP per token'
    """
    config = compose(source, overrides)
    with torch.device("meta"):
        model: Any = build(replace(config, fusion=replace(config.fusion, scope="none")))
    check_described(config, model, "context_length")
    parameters, embedding_parameters = parameter_counts(model)
    try:
        forward_flops, all_flops = _flops(model)
        float32_bytes, bfloat16_bytes = (_saved_bytes(model, dtype) for dtype in (torch.float32, torch.bfloat16))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the costs of model {config.model.name!r} cannot be counted, since its computation depends on values: "
            f"{error}"
        ) from error
    return ModelCosts(
        parameters=parameters,
        embedding_parameters=embedding_parameters,
        tokens=model.context_length,
        forward_flops=forward_flops,
        backward_flops=all_flops - forward_flops,
        float32_bytes=float32_bytes,
        bfloat16_bytes=bfloat16_bytes,
    )


def check_described(config: Config, model: Any, *attributes: str) -> None:
    """Raise ValueError unless a model has `example_inputs` and the attributes. The commands use this too."""
    if not all(hasattr(model, name) for name in ("example_inputs", *attributes)):
        wanted = "".join(f" and an attribute {name}" for name in attributes)
        raise ValueError(
            f"{type(model).__name__} of model {config.model.name!r} needs a method "
            f'example_inputs(batch_size=1, device="meta"){wanted}'
        )


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Return the number of a model's parameters, and how many of them are in an `nn.Embedding`. Tied ones count once.

    >>> parameter_counts(nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 3)))
    (19, 10)
    """
    tables = {table.weight for table in model.modules() if isinstance(table, nn.Embedding)}
    return sum(parameter.numel() for parameter in model.parameters()), sum(table.numel() for table in tables)


def _flops(model: Any) -> tuple[int, int]:
    """Return the FLOPs of forward, and of forward and backward."""
    # Attention as matrix products has the same FLOPs on every device.
    with FakeTensorMode(), FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        weights = _fake_weights(model, torch.float32)
        # The fused loss computes gradients in forward; the FLOPs of both together are the same.
        if isinstance(getattr(model, "loss", None), str):
            model, model.loss = copy.copy(model), "plain"
        loss = _call(model, weights, torch.float32)
        forward = counter.get_total_flops()
        loss.backward()  # type: ignore[no-untyped-call]
        return forward, counter.get_total_flops()


def _saved_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    with FakeTensorMode():
        weights = _fake_weights(model, dtype)
        return saved_by_call(lambda: _call(model, weights, dtype), exempt=weights.values())


def _fake_weights(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return parameters and buffers as fake CPU tensors, the floating ones in `dtype`; torch chooses CPU kernels."""
    named = (*model.named_parameters(), *model.named_buffers())
    return {
        name: torch.empty(tensor.shape, dtype=_in(dtype, tensor), device="cpu", requires_grad=tensor.requires_grad)
        for name, tensor in named
    }


def _call(model: Any, weights: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
    # The caller's default device may be another one.
    with torch.device("cpu"):
        inputs = tuple(tensor.to(_in(dtype, tensor)) for tensor in model.example_inputs(device="cpu"))
        loss: Tensor = torch.func.functional_call(model, weights, inputs)
    return loss


def _in(dtype: torch.dtype, tensor: Tensor) -> torch.dtype:
    return dtype if tensor.is_floating_point() else tensor.dtype
