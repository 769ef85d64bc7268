"""Models and their batches; checks that compare a divided model with the plain model in the same process."""

import traceback
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint.state_dict as states
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import fuselayers as fl
from fuselayers.components import Choice, Decoder, Encoder, EncoderDecoder, Model, parallelize

# Every component that a model may have, with dropout where it takes any. Two and four do not divide TOKENS.
BATCH, TOKENS = 3, 7
SHIPPED = (
    "gpt_nano",
    "bert_tiny",
    "llama_tiny",
    "qwen3_tiny",
    "gemma2_tiny",
    "mistral_tiny",
    "mixtral_tiny",
    "t5_tiny",
    "vit_tiny",
)


def shipped(name: str) -> Model:
    """Return a shipped model with dropout everywhere."""
    mlp = "feedforward.expert" if name == "mixtral_tiny" else "feedforward"
    dropout = [f"{part}.dropout=0.1" for part in ("model", "attention", mlp)]
    return fl.build(name, [*dropout, "fusion=off"])


_HEADS = {"num_heads": 4, "dropout": 0.1}
_SIZES: dict[str, Any] = {"vocab_size": 20, "hidden_dim": 16, "num_layers": 2, "context_length": 8, "dropout": 0.1}
_MLP = {"width": 24, "dropout": 0.1}


def _decoder(attention: dict[str, Any] | Choice | None = None, **changes: Any) -> Model:
    heads = attention if isinstance(attention, Choice) else Choice("multi_head", {**_HEADS, **(attention or {})})
    arguments = {**_SIZES, "attention": heads, "feedforward": Choice("mlp", _MLP), **changes}
    return Decoder(**arguments)


def _encoder(attention: Choice, **changes: Any) -> Model:
    return Encoder(**{**_SIZES, "attention": attention, "feedforward": Choice("mlp", _MLP), **changes})


def _mixture(expert: dict[str, Any], **options: Any) -> Choice:
    chosen = {"num_experts": 4, "z_coefficient": 0.1, "balance_coefficient": 0.5, **options}
    return Choice("mixture_of_experts", {**chosen, "expert": Choice("mlp", {**_MLP, **expert})})


# Name -> model. The name says how the model differs.
COMPONENTS = {
    "separate": lambda: _decoder({"projections": "separate", "num_kv_heads": 4}),
    "shared": lambda: _decoder({"projections": "shared"}),
    "sinks": lambda: _decoder({"sinks": True, "qk_norm": "layer_norm", "num_kv_heads": 4, "head_dim": 6}),
    "capped": lambda: _decoder({"soft_cap": 5.0, "window": 3, "bias": False}, logit_soft_cap=3.0, position="alibi"),
    "local": lambda: _decoder(Choice("local", {"num_heads": 4, "window": 2, "dropout": 0.1}), position="rotary"),
    "linear": lambda: _decoder(Choice("linear", {"num_heads": 4})),
    "favor": lambda: _decoder(Choice("favor", {"num_heads": 4, "num_features": 8, "dropout": 0.1})),
    "nystrom": lambda: _encoder(
        Choice("nystrom", {"num_heads": 4, "num_landmarks": 3, "conv_kernel_size": 3, "dropout": 0.1})
    ),
    "linformer": lambda: _encoder(Choice("linformer", {"num_heads": 4, "projected_length": 3, "dropout": 0.1})),
    "gated": lambda: _decoder(feedforward=Choice("gated_mlp", {**_MLP, "packed": True, "bias": True})),
    "fused": lambda: _decoder(feedforward=Choice("fused_mlp", _MLP), backend="eager", tie_embeddings=False),
    "conv": lambda: _decoder(feedforward=Choice("conv_mlp", {**_MLP, "kernel_size": 2})),
    "mixture": lambda: _decoder(feedforward=_mixture({}, shared_experts=1)),
    "capacity": lambda: _decoder(feedforward=_mixture({}, capacity_factor=0.75), loss="fused"),
    "expert_choice": lambda: _encoder(
        Choice("multi_head", _HEADS), feedforward=_mixture({}, gating="expert_choice"), loss="fused"
    ),
    "post": lambda: _decoder(residual="post", norm="dyt", position="sinusoidal"),
    "deepnorm": lambda: _decoder(residual=Choice("deepnorm", {"stochastic_depth": 0.5}), vocab_size=21),
    "sandwich": lambda: _decoder(
        residual=Choice("sandwich", {"layer_scale": 0.3}), norm=Choice("rms_norm", {"unit_offset": True})
    ),
    "parallel": lambda: _decoder(residual=Choice("parallel", {"layer_scale": 0.3, "stochastic_depth": 0.5})),
    "bloom": lambda: _decoder(
        residual=Choice("parallel", {"separate_norms": True}),
        position="alibi",
        embedding_norm=True,
        embedding_dropout=0.2,
        head_bias=True,
    ),
    "skip": lambda: _decoder(norm="skip", position="none", loss="fused"),
    "pair": lambda: EncoderDecoder(
        **{**_SIZES, "attention": Choice("multi_head", _HEADS), "feedforward": Choice("mlp", _MLP)},
        position="relative",
        residual="post",
    ),
}


class Step(NamedTuple):
    """A training step: the loss, the gradient of each parameter, and the norm of all gradients."""

    loss: float
    gradients: dict[str, Tensor]
    norm: float


def batch_of(model: Model, tokens: int = TOKENS) -> tuple[Tensor, ...]:
    """Return a batch for a model, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    batch = []
    for example in model.example_inputs(BATCH, device="cpu"):
        if example.is_floating_point():
            batch.append(torch.randn(example.shape, generator=generator))
        else:
            shape = (BATCH, tokens) if example.dim() == 2 else example.shape
            batch.append(torch.randint(0, 10, shape, generator=generator))
    batch[-1].flatten()[0] = -100
    return tuple(batch)


def step(model: nn.Module, batch: tuple[Tensor, ...], *, seed: int = 7, **inputs: Any) -> Step:
    """Run forward and backward of a training step, with dropout masks from a seed.

    The loss of a batch without targets is the mean square of the logits.
    """
    torch.manual_seed(seed)
    output = model(*batch, **inputs)
    loss = output.square().mean() if output.dim() else output
    loss.backward()
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    )
    gradients = {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return Step(loss.item(), gradients, whole(norm).item())


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor, or the whole of a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def group() -> DeviceMesh:
    """Return all processes as one tensor-parallel group."""
    return init_device_mesh("cpu", (torch.distributed.get_world_size(),))


def made(name: str) -> Any:
    """Return a model of COMPONENTS or a shipped model, with the same weights in every process."""
    torch.manual_seed(0)
    return COMPONENTS[name]() if name in COMPONENTS else shipped(name)


def check_step(name: str, *, sequence: bool, targets: bool = True, **inputs: Any) -> None:
    """Compare a step of a plain model with that of the same model divided among all processes."""
    model = made(name)
    batch = batch_of(model) if targets else batch_of(model)[:1]
    wanted = step(model, batch, **inputs)
    model.zero_grad()
    parallelize(model, group(), sequence=sequence)
    assert_same(wanted, step(model, batch, **inputs))


def assert_same(plain: Step, divided: Step, tolerance: float = 1e-5) -> None:
    """Raise unless two steps agree to the rounding of float32."""
    assert abs(plain.loss - divided.loss) <= tolerance * abs(plain.loss), (plain.loss, divided.loss)
    assert abs(plain.norm - divided.norm) <= tolerance * plain.norm, (plain.norm, divided.norm)
    assert plain.gradients.keys() == divided.gradients.keys()
    largest = max(gradient.abs().max().item() for gradient in plain.gradients.values())
    for name, gradient in plain.gradients.items():
        # Some gradients are zero except for rounding, such as those of the keys' biases.
        torch.testing.assert_close(
            divided.gradients[name],
            gradient,
            rtol=tolerance,
            atol=tolerance * max(gradient.abs().max().item(), 0.01 * largest),
            msg=lambda text, name=name: f"{name}: {text}",
        )


def inputs_of(name: str) -> dict[str, Any]:
    """Return masks or documents for some models."""
    if name == "separate":
        return {"mask": torch.rand(1, 4, TOKENS, TOKENS, generator=torch.Generator().manual_seed(3)) > 0.3}
    if name in ("capped", "local"):
        return {"document_ids": torch.arange(BATCH * TOKENS).view(BATCH, TOKENS) // 3}
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    real[0, :2] = False
    return {"key_padding_mask": real} if name in ("bert_tiny", "conv", "mixture", "capacity", "pair") else {}


def check_generation(sequence: bool) -> None:
    """Compare the tokens that a divided model generates, greedy and sampled, with those of the plain model."""
    for name in ("capped", "gated", "pair"):
        model = made(name).eval()
        prompts = batch_of(model, tokens=3)[0]
        wanted = _written(model, prompts)
        parallelize(model, group(), sequence=sequence)
        for got, tokens in zip(_written(model, prompts), wanted, strict=True):
            torch.testing.assert_close(got, tokens, msg=lambda text, name=name: f"{name}: {text}")


def _written(model: Any, prompts: Tensor) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(4)
    return [
        model.generate(prompts, 4, temperature=0.0),
        model.generate(prompts, 4, generator=drawn, temperature=2.0),
    ]


def check_logits(sequence: bool) -> None:
    """Compare a loss that is computed from the logits outside the model, and its gradients."""
    for name in ("capped", "fused", "vit_tiny"):
        check_step(name, sequence=sequence, targets=False)


def check_meta(sequence: bool) -> None:
    """Compare a model that was divided on the meta device and then loaded."""
    plain = made("gated")
    batch = batch_of(plain)
    wanted = step(plain, batch)
    with torch.device("meta"):
        model = COMPONENTS["gated"]()
    parallelize(model, group(), sequence=sequence).to_empty(device="cpu")
    states.set_model_state_dict(
        model, plain.state_dict(), options=states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    assert_same(wanted, step(model, batch))


def check_first_process(sequence: bool) -> None:
    """Compare a model whose processes start with different weights: the first process's count. Some are frozen."""
    plain = made("separate")
    _freeze(plain)
    batch = batch_of(plain)
    wanted = step(plain, batch)
    torch.manual_seed(torch.distributed.get_rank())
    model = COMPONENTS["separate"]()
    _freeze(model)
    parallelize(model, group(), sequence=sequence)
    assert_same(wanted, step(model, batch))


def _freeze(model: Any) -> None:
    for part in (model.token, model.blocks[0].attention.q, model.blocks[1].residual.norms[0]):
        part.requires_grad_(False)


def check_refusal(sequence: bool) -> None:
    """Check that a refused model is unchanged."""
    model = made("separate")
    model.blocks[1].feedforward.down = nn.Sequential(model.blocks[1].feedforward.down)
    before = dict(model.named_parameters())
    try:
        parallelize(model, group(), sequence=sequence)
    except ValueError:
        assert all(parameter is before[name] for name, parameter in model.named_parameters())
        assert model.blocks[0].attention.num_heads == 4
    else:
        raise AssertionError("it was not refused")


CHECKS = {
    "generation": check_generation,
    "logits": check_logits,
    "meta": check_meta,
    "first_process": check_first_process,
    "refusal": check_refusal,
}


def errors_of(pairs: list[tuple[str, bool]]) -> list[str | None]:
    """Return the error or None of each pair: the name of a model or check, and whether tokens are divided."""
    errors: list[str | None] = []
    for name, sequence in pairs:
        try:
            if name in CHECKS:
                CHECKS[name](sequence)
            else:
                check_step(name, sequence=sequence, **inputs_of(name))
            errors.append(None)
        except Exception:
            errors.append(traceback.format_exc())
    return errors
