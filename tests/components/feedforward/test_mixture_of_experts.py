import copy
import math
import pickle
import re
from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from fuselayers.components import Choice, Decoder, MixtureOfExperts
from fuselayers.configs import build
from fuselayers.partition import fuse
from tests.components.call import Call
from tests.components.compare import assert_same_step, randomise

HEADS = Choice("multi_head", {"num_heads": 2})
DENSE_TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}


def written_out(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
    """The result and the loss in plain torch, token by token and expert by expert."""
    tokens = x.reshape(-1, x.shape[-1])
    logits = tokens @ layer.router.weight.T
    places = by_experts(layer, logits) if layer.gating == "expert_choice" else by_tokens(layer, logits)[0]
    rows = []
    for token, row in enumerate(tokens):
        y = torch.zeros_like(row)
        for expert, weight in places[token].items():
            y = y + weight * layer.experts[expert](row)
        for shared in layer.shared:
            y = y + shared(row)
        rows.append(y)
    # Gradients of 0 in place of None.
    unused = sum((0 * parameter).sum() for parameter in layer.parameters())
    return torch.stack(rows).view(x.shape) + unused, 7 * written_loss(layer, logits).float().double()


def by_tokens(layer: MixtureOfExperts, logits: Tensor) -> tuple[list[dict[int, Tensor]], list[tuple[int, int]]]:
    """Return each token's experts with their weights, and the dropped assignments as (token, expert)."""
    num_experts = logits.shape[1]
    room = [capacity(layer, len(logits))] * num_experts
    places: list[dict[int, Tensor]] = []
    dropped = []
    for token, row in enumerate(logits):
        chosen = sorted(range(num_experts), key=lambda expert: -row[expert].item())[: layer.top_k]
        powers = [row[expert].exp() for expert in (chosen if layer.normalise_weights else range(num_experts))]
        places.append({})
        for expert in chosen:
            if room[expert]:
                room[expert] -= 1
                places[-1][expert] = row[expert].exp() / sum(powers)
            else:
                dropped.append((token, expert))
    return places, dropped


def by_experts(layer: MixtureOfExperts, logits: Tensor) -> list[dict[int, Tensor]]:
    shares = torch.stack([row.exp() / row.exp().sum() for row in logits])
    places: list[dict[int, Tensor]] = [{} for _ in logits]
    for expert in range(logits.shape[1]):
        ranked = sorted(range(len(logits)), key=lambda token: -shares[token, expert].item())
        for token in ranked[: capacity(layer, len(logits))]:
            places[token][expert] = shares[token, expert]
    return places


def capacity(layer: MixtureOfExperts, tokens: int) -> int:
    factor = layer.capacity_factor
    if factor is None:
        if layer.gating == "top_k":
            return tokens
        factor = 1.0
    return min(tokens, math.ceil(Fraction(str(factor)) * layer.top_k * tokens / len(layer.experts)))


def written_loss(layer: MixtureOfExperts, logits: Tensor) -> Tensor:
    tokens, num_experts = logits.shape
    balance = torch.zeros((), dtype=logits.dtype)
    for expert in range(num_experts if layer.gating == "top_k" else 0):
        chose = sum(
            expert in sorted(range(num_experts), key=lambda other, row=row: -row[other].item())[: layer.top_k]
            for row in logits
        )
        mean = sum(row[expert].exp() / row.exp().sum() for row in logits) / tokens
        balance = balance + num_experts * chose / tokens * mean
    small = sum(row.exp().sum().log() ** 2 for row in logits) / tokens
    return layer.balance_coefficient * balance + layer.z_coefficient * small


def with_loss(layer: MixtureOfExperts, x: Tensor, *, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    y = layer(x, key_padding_mask=mask)
    assert layer.auxiliary_loss.dtype == torch.float32
    return y, 7 * layer.auxiliary_loss.double()  # not a weight of 1, which would hide a lost factor


def mixture(**options: object) -> MixtureOfExperts:
    torch.manual_seed(5)
    options = {"expert": Choice("mlp", {"width": 3, "activation": "silu"}), "z_coefficient": 0.3, **options}
    layer = MixtureOfExperts(6, balance_coefficient=0.5, **options).double()  # type: ignore[arg-type]
    randomise(layer)
    with torch.no_grad():
        layer.router.weight.normal_()
    return layer


def check(layer: MixtureOfExperts, x: Tensor) -> None:
    """Compare values, the loss and all gradients, the router's included, with the formula."""
    assert_same_step(Call(layer, written_out, {}), Call(layer, with_loss, {}), x, **DENSE_TOLERANCE)


GATES = [
    {"top_k": top_k, "capacity_factor": factor, "normalise_weights": normalise}
    for top_k, factor, normalise in product((1, 2, 4), (None, 0.6, 1.25), (True, False))
]
CHOICES = [
    {"gating": "expert_choice", "causal": False, "top_k": top_k, "capacity_factor": factor}
    for top_k, factor in ((1, None), (2, None), (2, 0.3), (4, 9.0))
]


@pytest.mark.parametrize("options", [*GATES, *CHOICES])
def test_it_is_its_formula(options: dict[str, object]) -> None:
    check(mixture(num_experts=4, **options), torch.randn(3, 7, 6, dtype=torch.float64))


# Runs, slots and expert choice sort tokens in three functions, which take one token or many.
@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_k": 2, "capacity_factor": 0.5}, CHOICES[2]])
@pytest.mark.parametrize("shape", [(6,), (129, 6), (2, 1, 3, 6)])
def test_shapes(options: dict[str, object], shape: tuple[int, ...]) -> None:
    check(mixture(num_experts=3, shared_experts=2, **options), torch.randn(shape, dtype=torch.float64))


def routed(layer: MixtureOfExperts, logits: list[list[float]]) -> Tensor:
    """Set the router, and return tokens for which it gives these logits."""
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, : len(logits[0])] = torch.eye(len(logits[0]))
    x = torch.randn(len(logits), 6, dtype=torch.float64)
    x[:, : len(logits[0])] = torch.tensor(logits, dtype=torch.float64)
    return x


def test_an_expert_serves_its_tokens_in_their_order_and_drops_those_beyond_its_capacity() -> None:
    # ceil(0.5 * 2 * 4 / 3) = 2 places for each of 3 experts.
    layer = mixture(num_experts=3, top_k=2, capacity_factor=0.5)
    x = routed(layer, [[3.0, 2.0, 0.0], [2.0, 3.0, 0.0], [9.0, 0.0, 5.0], [0.0, 9.0, 8.0]])
    check(layer, x)
    # Tokens 2 and 3 have higher logits for experts 0 and 1 than tokens 0 and 1, but come later.
    assert by_tokens(layer, x @ layer.router.weight.T)[1] == [(2, 0), (3, 1)]
    dropped = torch.tensor([5.0]).exp() / (torch.tensor([9.0]).exp() + torch.tensor([5.0]).exp())
    torch.testing.assert_close(layer(x)[2], dropped.double() * layer.experts[2](x[2]), rtol=1e-6, atol=1e-6)


def test_a_capacity_is_reckoned_in_decimal_digits() -> None:
    layer = mixture(num_experts=2, top_k=1, capacity_factor=1.1)
    y = layer(routed(layer, [[1.0, 0.0]] * 100))
    assert y.any(-1).tolist() == [True] * 55 + [False] * 45  # in binary 1.1 * 50 is a little more than 55


def test_an_infinite_result_stays_with_its_own_tokens() -> None:
    layer = mixture(num_experts=2, top_k=1, capacity_factor=0.5)
    x = routed(layer, [[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    with torch.no_grad():
        layer.experts[0].down.bias.fill_(torch.inf)
    y = layer(x)
    assert y[0].isinf().all()
    assert not y[1].any()
    assert y[2].isfinite().all()


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.75}])
def test_of_equal_logits_the_first_expert_is_taken(options: dict[str, object]) -> None:
    layer = mixture(num_experts=4, top_k=2, **options)
    x = routed(layer, [[0.0, 0.0, 0.0, 0.0], [1.0, 0.0, 1.0, 1.0], [0.0, 2.0, 0.0, 0.0]])
    check(layer, x)


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 1.0}, CHOICES[1]])
def test_the_router_works_in_32_bits(options: dict[str, object]) -> None:
    layer = mixture(num_experts=3, **options).bfloat16()
    x = torch.randn(7, 6).bfloat16()
    wide = copy.deepcopy(layer).float()
    expected, expected_loss = wide(x.float()), wide.auxiliary_loss
    y = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = wide(x.float())
    for result, loss in ((y, layer.auxiliary_loss), (under_autocast, wide.auxiliary_loss)):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result.float(), expected, rtol=0.05, atol=0.05)
        torch.testing.assert_close(loss, expected_loss)


def test_an_adapter_in_the_routers_place_is_called() -> None:
    layer = mixture(num_experts=3, top_k=1, normalise_weights=False)
    x = torch.randn(7, 6, dtype=torch.float64)
    layer.router = nn.Sequential(layer.router, nn.Tanh())  # type: ignore[assignment]
    weights = layer.router(x).softmax(-1)
    expected = [weights[i].max() * layer.experts[int(weights[i].argmax())](row) for i, row in enumerate(x)]
    torch.testing.assert_close(layer(x), torch.stack(expected), **DENSE_TOLERANCE)


def test_copies_leave_the_loss_behind() -> None:
    layer = mixture()
    x = torch.randn(7, 6, dtype=torch.float64)
    layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.auxiliary_loss is None
        torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)
    assert layer.auxiliary_loss is not None


@pytest.mark.parametrize(
    ("options", "backend", "padded", "dynamic"),
    [
        ({}, "aot_eager", True, False),  # without padding: the fused test below
        ({"capacity_factor": 0.7}, "aot_eager", False, False),
        (CHOICES[1], "aot_eager", False, False),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ({}, "aot_eager", False, False),
                ({}, "inductor", False, False),
                ({}, "inductor", True, False),
                ({"capacity_factor": 0.7}, "aot_eager", False, True),
                (CHOICES[1], "aot_eager", False, True),
            )
        ),
    ],
)
def test_it_is_one_graph(options: dict[str, object], backend: str, padded: bool, dynamic: bool) -> None:
    """Without a capacity also without `fullgraph=True`: Dynamo then breaks a graph at sizes that depend on data."""
    torch.compiler.reset()  # all cases share the code of `Call`, which Dynamo compiles eight times
    mask = torch.tensor([[True, True, False], [True, True, True]]) if padded else None
    plain = Call(mixture(**{"num_experts": 4, "top_k": 2, **options}), with_loss, {"mask": mask})
    compiled, counter = copy.deepcopy(plain), CompileCounterWithBackend(backend)
    compiled.compile(backend=counter, fullgraph=bool(options), dynamic=dynamic)
    # Equal tokens leave two experts without any.
    for x in (torch.randn(2, 3, 6, dtype=torch.float64), torch.ones(3 if dynamic else 2, 3, 6, dtype=torch.float64)):
        assert_same_step(plain, compiled, x, **DENSE_TOLERANCE)
    assert dynamic or counter.frame_count == 1  # a new size may compile again


@pytest.mark.parametrize(
    "partition",
    ["min_cut", *(pytest.param(partition, marks=pytest.mark.slow) for partition in ("default", "budget:0.5"))],
)
def test_without_a_capacity_it_is_fused_as_one_graph(partition: str) -> None:
    layer = mixture(num_experts=3)
    fused = fuse(layer, backend="eager", partition=partition, fallback=())
    assert_same_step(layer, fused, torch.randn(7, 6, dtype=torch.float64), **DENSE_TOLERANCE)
    assert len(fused.report().graphs) == 1


def test_a_token_costs_its_experts_and_no_value_is_read() -> None:
    layer = MixtureOfExperts(6, num_experts=8, top_k=2, expert=Choice("gated_mlp", {"width": 4})).to("meta")
    with FlopCounterMode(display=False) as counter:
        layer(torch.zeros(5, 6, device="meta"))  # a meta tensor has no values
    assert counter.get_total_flops() == 2 * 5 * (6 * 8 + 2 * 3 * 6 * 4)


def with_a_hook(layer: MixtureOfExperts) -> None:
    layer.experts[1].register_forward_hook(lambda module, args, y: 2 * y)


def with_an_adapter(layer: MixtureOfExperts) -> None:
    layer.experts[1].up = nn.Sequential(layer.experts[1].up, nn.Tanh())


def with_options_of_its_own(layer: MixtureOfExperts) -> None:
    layer.experts[1].activation = "relu"


# Plain experts run as a single product, and in slots if there is a capacity; each change must end both.
@pytest.mark.parametrize("change", [with_a_hook, with_an_adapter, with_options_of_its_own])
@pytest.mark.parametrize("capacity_factor", [None, 1.25])
def test_an_expert_that_was_changed_is_called(
    change: Callable[[MixtureOfExperts], None], capacity_factor: float | None
) -> None:
    layer = mixture(num_experts=3, capacity_factor=capacity_factor)
    change(layer)
    check(layer, torch.randn(3, 7, 6, dtype=torch.float64))


def test_the_second_derivative() -> None:
    layer, x = mixture(num_experts=3), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x, *_: layer(x), (x, *layer.experts.parameters()))


def test_the_dropout_of_the_model_reaches_experts() -> None:
    def dropout_of(*overrides: str) -> float:
        overrides = ("feedforward=mixture_of_experts", "feedforward.num_experts=2", *overrides)
        return float(build("gpt_nano", [*overrides, "fusion=off"]).blocks[0].feedforward.experts[1].dropout)  # type: ignore[index, union-attr]

    assert dropout_of() == 0.1
    assert dropout_of("model.dropout=0.3") == 0.3
    assert dropout_of("feedforward.expert.dropout=0.2") == 0.2


@pytest.mark.parametrize("capacity_factor", [None, 1.5])
def test_under_vmap_it_gives_the_gradients_of_each_sample(capacity_factor: float | None) -> None:
    x, layer = torch.randn(3, 5, 6, dtype=torch.float64), mixture(num_experts=3, capacity_factor=capacity_factor)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,)).square().sum()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(layer.named_parameters()), x)
    for sample, gradient in zip(x, gradients["router.weight"], strict=True):
        (expected,) = torch.autograd.grad(layer(sample).square().sum(), layer.router.weight)
        torch.testing.assert_close(gradient, expected, **DENSE_TOLERANCE)


@pytest.mark.parametrize("options", [*GATES[:6:2], *GATES[6:12], *CHOICES])
def test_padding_is_as_good_as_nothing(options: dict[str, object]) -> None:
    layer = mixture(num_experts=4, shared_experts=1, **options)
    real_BT = torch.tensor([[False, True, True, True, False, True, True], [False] * 7, [True] * 3 + [False] * 4])
    x = torch.randn(3, 7, 6, dtype=torch.float64)
    x[~real_BT] = layer.router.weight[0].detach() * 9  # all padding prefers the first expert, more than any token

    def of_real(layer: MixtureOfExperts, x: Tensor) -> tuple[Tensor, Tensor]:
        y, loss = with_loss(layer, x, mask=real_BT)
        assert torch.equal(y[~real_BT], layer.shared[0](x)[~real_BT])
        return y[real_BT], loss

    without_padding = Call(layer, lambda layer, x: with_loss(layer, x[real_BT]), {})
    assert_same_step(without_padding, Call(layer, of_real, {}), x, **DENSE_TOLERANCE)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.7}, CHOICES[1]])
def test_without_real_tokens_nothing_is_learnt(options: dict[str, object], tokens: int) -> None:
    layer = mixture(num_experts=3, **options)
    mask = torch.zeros(2, tokens, dtype=torch.bool) if tokens else None
    y = layer(torch.randn(2, tokens, 6, dtype=torch.float64), key_padding_mask=mask)
    assert y.shape == (2, tokens, 6)
    assert not y.any()
    assert layer.auxiliary_loss == 0
    (y.sum() + layer.auxiliary_loss).backward()
    assert all(not parameter.grad.any() for parameter in layer.parameters())


def test_with_a_cache_it_is_told_of_the_new_tokens() -> None:
    mixed = Choice("mixture_of_experts", {"num_experts": 2})
    sizes = {"vocab_size": 9, "hidden_dim": 8, "num_layers": 1, "context_length": 6}
    model = Decoder(**sizes, attention=HEADS, feedforward=mixed).eval()
    x_BTD, real_BT = torch.randn(2, 5, 8), torch.tensor([[False, True, True, True, True], [True] * 5])
    with torch.no_grad():
        expected = model.run_blocks(x_BTD, key_padding_mask=real_BT)
        caches = model.new_caches(5)
        assert caches is not None
        model.run_blocks(x_BTD[:, :3], key_padding_mask=real_BT[:, :3], caches=caches)
        newest = model.run_blocks(x_BTD[:, 3:], key_padding_mask=real_BT, caches=caches)
    torch.testing.assert_close(newest, expected[:, 3:])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_experts": 2, "top_k": 3}, "top_k must be at most num_experts, 2, got 3"),
        (
            {"gating": "expert_choice", "causal": True},
            "gating 'expert_choice' lets a later token displace an earlier token, which a causal model must not; "
            "use gating='top_k'",
        ),
        (
            {"expert": "conv_mlp"},
            "expert 'conv_mlp' mixes tokens, but an expert gets its tokens without their neighbours; use an "
            "expert that treats each token alone, such as 'mlp'",
        ),
        ({"expert": Choice("mixture_of_experts", {"capacity_factor": 1.0})}, "expert 'mixture_of_experts' mixes"),
    ],
)
def test_errors(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        MixtureOfExperts(4, **options)  # type: ignore[arg-type]
