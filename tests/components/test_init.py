import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fuselayers.components import Choice, Decoder, Encoder, Scheme, initialise, parameter_groups

SIZES = {
    "vocab_size": 200,
    "hidden_dim": 128,
    "num_layers": 8,
    "context_length": 64,
    "attention": Choice("multi_head", {"num_heads": 4, "num_kv_heads": 2}),
}
INTO_STREAM = ("attention.out.weight", "feedforward.down.weight", "cross_attention.out.weight")
OUTSIDE = ("token.weight", "table.weight", "segment.weight", "head.weight")


def decoder(**options: object) -> Decoder:
    return Decoder(**{**SIZES, "tie_embeddings": False, **options})


def assert_deviations(model: nn.Module, expected: Callable[[str, Tensor], float]) -> None:
    seen = 0
    for name, value in model.named_parameters():
        if value.dim() < 2:
            assert (value == (1 if "norm" in name and name.endswith("weight") else 0)).all(), name
            continue
        wanted = expected(name, value)
        few = 0.2 if value.numel() < 1000 else 0.05
        assert value.std().item() == pytest.approx(wanted, rel=few), name
        assert abs(value.mean().item()) <= few * wanted, name
        seen += name.endswith(INTO_STREAM)
    assert seen


@pytest.mark.parametrize("feedforward", ["mlp", "fused_mlp", "gated_mlp"])
def test_gpt2(feedforward: str) -> None:
    std = 0.1
    model = decoder(feedforward=feedforward, init_std=std)
    assert_deviations(model, lambda name, _: std / math.sqrt(2 * 8) if name.endswith(INTO_STREAM) else std)


def test_bert_has_no_smaller_weights() -> None:
    assert_deviations(Encoder(**SIZES, init_std=0.05), lambda *_: 0.05)


def test_deepnorm_of_a_decoder() -> None:
    model = decoder(init="deepnorm", residual="deepnorm", init_std=0.03)
    beta = (8 * 8) ** -0.25

    def expected(name: str, value: Tensor) -> float:
        if name.endswith("qkv.weight"):
            return value.std().item()  # checked below, for each of its three matrices
        return 0.03 if name.endswith(OUTSIDE) else beta * math.sqrt(2 / sum(value.shape))

    assert_deviations(model, expected)
    for block in model.blocks:
        query, key, value = block.attention.qkv.weight.split([128, 64, 64])
        assert query.std().item() == pytest.approx(math.sqrt(2 / (128 + 128)), rel=0.05)
        assert key.std().item() == pytest.approx(math.sqrt(2 / (128 + 64)), rel=0.05)
        assert value.std().item() == pytest.approx(beta * math.sqrt(2 / (128 + 64)), rel=0.05)


def test_vit() -> None:
    model = decoder(init="vit", init_std=0.03)
    model.patch = nn.Conv2d(3, 128, 4)
    model.class_token = nn.Parameter(torch.full((1, 1, 4096), math.nan))
    initialise(model, "vit", num_layers=8, std=0.03)
    assert not model.head.weight.any()
    assert model.token.weight.std().item() == pytest.approx(0.03, rel=0.05)
    assert model.class_token.std().item() == pytest.approx(1e-6, rel=0.1)
    block = model.blocks[1]
    for matrix in (
        *block.attention.qkv.weight.split([128, 64, 64]),
        block.attention.out.weight,
        block.feedforward.up.weight,
    ):
        bound = math.sqrt(6 / sum(matrix.shape))
        assert 0.99 * bound < matrix.abs().max().item() <= bound
        assert matrix.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert 0.99 < model.patch.weight.abs().max().item() / math.sqrt(6 / (3 * 16 + 128)) <= 1
    assert not model.patch.bias.any()


def test_mup_is_gpt2_at_the_base_width_and_smaller_beyond() -> None:
    def expected(name: str, value: Tensor) -> float:
        shrunk = 0.02 if name.endswith(OUTSIDE) else 0.02 * math.sqrt(32 / 128)
        return shrunk / math.sqrt(2 * 8) if name.endswith(INTO_STREAM) else shrunk

    assert_deviations(decoder(init="mup", base_width=32), expected)
    torch.manual_seed(1)
    base = decoder(init="mup", base_width=128)
    torch.manual_seed(1)
    for (name, got), wanted in zip(base.named_parameters(), decoder().parameters(), strict=True):
        torch.testing.assert_close(got, wanted, msg=name)


def test_mup_scales_the_logits() -> None:
    tokens = torch.randint(200, (2, 5))
    for model_class in (Decoder, Encoder):
        model = model_class(**SIZES, init="mup", base_width=32)
        plain = model_class(**SIZES)
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(tokens), plain(tokens) / 4)


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.gates = nn.ParameterList([nn.Parameter(torch.full((3,), math.nan))])

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.inner.weight.fill_(7.0)
        self.gates[0].fill_(0.5)


def test_reset_parameters_overrides_the_init_scheme() -> None:
    model = nn.Sequential(Gate())
    initialise(model, "gpt2", num_layers=1)
    assert (model[0].inner.weight == 7).all()
    assert (model[0].gates[0] == 0.5).all()


def test_parameter_groups_scale_the_matrices_only() -> None:
    model = decoder(init="mup", base_width=32, position="learned")
    matrices, rest = parameter_groups(model, 0.1, base_width=32)
    assert (matrices["lr"], rest["lr"]) == (0.1 * 32 / 128, 0.1)
    named = {id(value): name for name, value in model.named_parameters()}
    assert {named[id(value)] for value in matrices["params"]} == {
        name for name, value in model.named_parameters() if value.dim() == 2 and not name.endswith(OUTSIDE)
    }
    assert {*map(id, matrices["params"] + rest["params"])} == {*named}
    assert len(matrices["params"] + rest["params"]) == len(named)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    assert [group["lr"] for group in parameter_groups(model, 0.1, base_width=32)] == [0.1]


def moved(width: int, scheme: Scheme) -> list[float]:
    """Return how far three Adam steps move the middle of the stream and the logits, for the coordinate check."""
    base = 64 if scheme == "mup" else None
    torch.manual_seed(3)
    heads = Choice("multi_head", {"num_heads": width // 16})
    model = Decoder(
        vocab_size=32, hidden_dim=width, num_layers=2, context_length=8, attention=heads, init=scheme, base_width=base,
        tie_embeddings=False,
    )  # fmt: skip
    tokens = torch.arange(64).view(8, 8) * 7 % 32
    seen: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda module, inputs, output: seen.append(output.detach()))
    with torch.no_grad():
        before = model(tokens)
    groups = parameter_groups(model, 0.003, base_width=64) if base else [{"params": [*model.parameters()]}]
    optimizer = torch.optim.Adam(groups, lr=0.003)
    for _ in range(3):
        optimizer.zero_grad()
        model(tokens, (tokens * 5 + 1) % 32).backward()
        optimizer.step()
    with torch.no_grad():
        after = model(tokens)
    return [(seen[-1] - seen[0]).square().mean().sqrt().item(), (after - before).square().mean().sqrt().item()]


def test_the_coordinate_check_of_mup() -> None:
    widths = (64, 128, 256, 512)
    mup, standard = ([moved(width, scheme) for width in widths] for scheme in ("mup", "gpt2"))
    for stream, logits in mup:
        assert stream == pytest.approx(mup[0][0], rel=0.3)
        assert logits == pytest.approx(mup[0][1], rel=0.3)
    # At the base width, the narrowest, both schemes give the same model.
    assert standard[0] == pytest.approx(mup[0])
    assert standard[-1][0] > 10 * standard[0][0]
    assert standard[-1][1] > 4 * standard[0][1]


NO_WIDTH = "init 'mup' needs the model's width, but Linear has no hidden_dim; set it"


@pytest.mark.parametrize(
    ("call", "arguments", "text"),
    [
        (initialise, {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (initialise, {"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, got 0"),
        (initialise, {"std": -0.1}, "std must be at least 0, got -0.1"),
        (
            *(initialise, {"scheme": "gpt"}),
            "no scheme 'gpt'; did you mean 'gpt2'? there are: bert, deepnorm, gpt2, mup, small, vit",
        ),
        (
            *(initialise, {"scheme": "mup"}),
            "init 'mup' needs base_width, the width at which std and learning rate were tuned",
        ),
        (
            *(initialise, {"base_width": 64}),
            "base_width is for init 'mup', got 64 with init 'gpt2'; leave it out",
        ),
        (initialise, {"scheme": "mup", "base_width": 64}, NO_WIDTH),
        (parameter_groups, {"learning_rate": 0.0, "base_width": 64}, "learning_rate must be above 0, got 0.0"),
        (parameter_groups, {"learning_rate": 0.1, "base_width": 0}, "base_width must be at least 1, got 0"),
        (parameter_groups, {"learning_rate": 0.1, "base_width": 64}, NO_WIDTH),
    ],
)
def test_errors(call: Callable[..., object], arguments: dict[str, object], text: str) -> None:
    required = {"scheme": "gpt2", "num_layers": 1} if call is initialise else {}
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        call(nn.Linear(1, 1), **{**required, **arguments})
