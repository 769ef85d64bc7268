import inspect
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from fuselayers.components.swap import fallbacks, swap, unswap
from fuselayers.partition import FallbackWarning, saved_bytes
from tests.components.compare import assert_same_values, run
from tests.components.swap.layers import Attention, Feedforward, Gated
from tests.components.swap.levels import gradients, pair, swap_at
from tests.components.swap.models import FAMILIES, batch_for, loss_of

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("vit", "eager"),
        *(pytest.param(name, "auto", marks=pytest.mark.slow) for name in ("llama", "gpt2", "bert")),
    ],
)
def test_blocks_share_a_graph(name: str, backend: str) -> None:
    model, batch = FAMILIES[name][0]().eval(), batch_for(name)
    expected = gradients(model, batch)
    report = swap(model, level="blocks", backend=backend, batch=batch)
    report.require("block", at_least=2)
    assert report.skipped == ()
    assert_same_values(expected, gradients(model, batch))
    if name != "vit":
        counters.clear()
        loss_of(model.train(), batch_for(name, tokens=7)).backward()
        loss_of(model, batch_for(name, tokens=9)).backward()
        # Training has its own graph: one for both blocks and all lengths.
        assert counters["stats"]["unique_graphs"] <= 1, "another length is compiled again"
    unswap(model)
    assert_same_values(expected, gradients(model.eval(), batch))


@pytest.mark.parametrize(
    "compress", ["int8", *(pytest.param(way, marks=pytest.mark.slow) for way in ("bfloat16", "float8"))]
)
def test_blocks_save_compressed_values(compress: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 256), nn.Sigmoid(), nn.Linear(256, 128)) for _ in range(2)))
    x = torch.randn(64, 128, requires_grad=True)
    wanted, before = model(x), saved_bytes(model, x)
    report = swap(model, level="blocks", backend="eager", compress=compress, batch=x)
    assert [site.rule for site in report.sites] == ["block", "block"]
    for loaded in (model, pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(loaded(x), wanted, rtol=1e-4, atol=1e-5)
        assert saved_bytes(loaded, x) < 0.55 * before
    unswap(model)
    with pytest.raises(ValueError, match="compress='int8' is for level='blocks', got level='auto'; layers save exact"):
        swap(model, compress="int8")


class OtherWhenCompiled(nn.Module):
    """A block with a fault of a compiler."""

    def __init__(self) -> None:
        super().__init__()
        self.feedforward = Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        return self.feedforward(x) * (1.05 if torch.compiler.is_compiling() else 1.0)


# The bound for 16-bit results is 3 %. Compression changes gradients, but no results.
@pytest.mark.parametrize(("dtype", "compress"), [(torch.bfloat16, None), (torch.float32, "int8")])
def test_a_wrong_block_is_not_swapped(dtype: torch.dtype, compress: str | None) -> None:
    model = nn.Sequential(OtherWhenCompiled(), OtherWhenCompiled()).to(dtype)
    with pytest.warns(UserWarning, match="its error is "):
        report = swap(model, level="blocks", backend="eager", compress=compress, batch=torch.randn(3, 8, dtype=dtype))
    assert report.sites == ()
    assert [module.name for module in report.skipped if "its error" in module.reason] == ["0", "1"]


# torch has two checkpoints. The modules draw their masks in an MLP and in attention.
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("kind", [Gated, Attention])
def test_under_checkpoints_backward_drops_the_elements_of_forward(kind: Any, use_reentrant: bool) -> None:
    model, x = nn.Sequential(kind(), kind()).train(), torch.randn(6, 8)
    swap(model, level="blocks", backend="eager", verify=False)

    def checkpointed(y: Tensor) -> Tensor:
        for block in model:
            y = checkpoint(block, y, use_reentrant=use_reentrant)
        return y

    assert_same_values(run(model, [x]), run(model, [x], call=checkpointed))


@pytest.mark.parametrize("level", ["layers", "blocks"])
def test_a_model_in_training_makes_no_cache_unless_it_is_asked_to(level: str) -> None:
    plain, model = pair("llama", level)
    unswap(model)
    report = swap_at(level, model)
    text = " ".join(str(report).split())
    assert "in training the model runs with use_cache=False" in text
    assert "in training with labels the logits of the output are None" in text
    batch = batch_for("llama")
    got = model(**batch)
    assert got.past_key_values is None
    torch.testing.assert_close(got.loss, plain(**batch).loss)
    with torch.no_grad():
        assert model.eval()(**batch).past_key_values is not None
    unswap(model)
    assert model.train()(**batch).past_key_values is not None
    assert not model._forward_pre_hooks


def test_a_models_own_cache_decides_whether_packed_sequences_see_each_other() -> None:
    plain, model = pair("llama", "layers")
    batch = batch_for("llama")
    batch["position_ids"] = torch.arange(batch["input_ids"].shape[1])[None] % 5
    losses = [form(**batch, **said).loss for form in (model, plain) for said in ({}, {"use_cache": False})]
    torch.testing.assert_close(losses[:2], losses[2:])
    assert abs(losses[0] - losses[1]) > 1e-4
    names = list(inspect.signature(plain.forward).parameters)
    cache = next(name for name in names if name in ("cache", "past_key_values"))  # the latter in older versions
    for said in ({"use_cache": None}, {cache: transformers.DynamicCache()}):
        args = [{"input_ids": batch["input_ids"], **said}.get(name) for name in names[: names.index(*said) + 1]]
        assert model(*args).past_key_values is not None


def test_a_block_that_fills_a_cache_runs_its_own_forward_and_says_so() -> None:
    plain, model = pair("llama", "blocks")
    batch = batch_for("llama")
    with pytest.warns(FallbackWarning, match="it fills a cache of keys and values; pass use_cache=False"):
        got = model(**batch, use_cache=True)
    wanted = plain(**batch, use_cache=True)
    torch.testing.assert_close(got.loss, wanted.loss)
    for entry, other in zip(got.past_key_values.layers, wanted.past_key_values.layers, strict=True):
        torch.testing.assert_close((entry.keys, entry.values), (other.keys, other.values))
    assert [skipped.kind for skipped in fallbacks(model)] == ["LlamaDecoderLayer"] * 2
    caches = [transformers.DynamicCache(), transformers.DynamicCache()]
    got, wanted = (form(**batch, past_key_values=cache) for form, cache in zip((model, plain), caches, strict=True))
    assert caches[0].get_seq_length() == caches[1].get_seq_length() == 12


def test_a_compiler_sees_the_blocks_own_forward() -> None:
    _, model = pair("llama", "blocks")
    counters.clear()
    torch.compile(model, backend="eager")(**batch_for("llama")).loss.backward()
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.slow
def test_blocks_pass_the_verification_with_many_rows() -> None:
    model = FAMILIES["gpt2"][0]()
    ids = torch.randint(3, 99, (16, 128))
    report = swap(model, level="blocks", batch={"input_ids": ids, "labels": ids})
    assert report.skipped == ()
    report.require("block", at_least=2)


def test_blocks_in_stages_of_two_widths_are_found() -> None:
    class Wide(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(2))

    model = nn.ModuleList([Wide(8), Wide(16)])
    report = swap(model, level="blocks", backend="eager", verify=False)
    assert [site.name for site in report.sites] == ["0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"]


def test_an_absent_module_in_a_list_is_no_block() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList([None, nn.LayerNorm(8), None])  # type: ignore[list-item]
            self.one = nn.ModuleList([None, nn.Sequential(nn.Linear(8, 8), nn.GELU())])  # type: ignore[list-item]
            self.absent = nn.ModuleList([None, None])  # type: ignore[list-item]
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(2)))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norms[1](self.blocks(x))
            return y

    report = swap(Model(), level="blocks", backend="eager", batch=torch.randn(4, 8))
    assert [site.name for site in report.sites] == ["blocks.0", "blocks.1"]


def test_blocks_in_a_list_of_lists_are_found() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = ([nn.LayerNorm(8), Attention(), nn.Sequential(nn.Linear(8, 8), nn.GELU())] for _ in range(3))
            self.layers = nn.ModuleList(map(nn.ModuleList, rows))

        def forward(self, x: Tensor) -> Tensor:
            for norm, attention, feedforward in self.layers:  # type: ignore[misc]
                x = x + attention(norm(x))
                x = x + feedforward(x)
            return x

    model, x = Model().eval(), torch.randn(2, 4, 8)
    wanted = model(x)
    report = swap(model, level="blocks", backend="eager", batch=x)
    found = sorted(site.name for site in report.sites if site.rule == "block")
    assert found == [f"layers.{row}.{place}" for row in range(3) for place in (1, 2)]
    torch.testing.assert_close(model(x), wanted)


def test_a_list_inside_a_list_of_lists_is_no_block() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = ([nn.LayerNorm(8), nn.ModuleList([Feedforward(), Feedforward()])] for _ in range(2))
            self.layers = nn.ModuleList(map(nn.ModuleList, rows))

        def forward(self, x: Tensor) -> Tensor:
            for norm, feedforwards in self.layers:  # type: ignore[misc]
                for feedforward in feedforwards:
                    x = x + feedforward(norm(x))
            return x

    report = swap(Model(), level="blocks", backend="eager", batch=torch.randn(4, 8))
    found = [(site.name, site.kind) for site in report.sites if site.rule == "block"]
    assert found == [(f"layers.{row}.1.{place}", "Feedforward") for row in range(2) for place in range(2)]


def test_two_blocks_between_other_layers_are_left_alone() -> None:
    """They would be compiled with other sizes than the blocks of the model."""
    stem = nn.Sequential(nn.LayerNorm(8), Feedforward(), Feedforward(), nn.Identity())
    assert swap(stem, level="blocks", backend="eager", batch=torch.randn(4, 8)).level != "blocks"


def test_blocks_of_two_classes_may_take_turns() -> None:
    model = nn.Sequential(*(module for _ in range(2) for module in (Feedforward(), Gated())))
    report = swap(model, level="blocks", backend="eager", batch=torch.randn(4, 8))
    assert [(site.name, site.kind) for site in report.sites if site.rule == "block"] == [
        ("0", "Feedforward"),
        ("2", "Feedforward"),
        ("1", "Gated"),
        ("3", "Gated"),
    ]


class Scan(nn.Module):
    """Its state goes from token to token."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BTD: Tensor) -> Tensor:
        states = [x_BTD[:, 0]]
        for token in range(1, x_BTD.shape[1]):
            states.append((self.linear(x_BTD[:, token]) + states[-1]).tanh())
        return torch.stack(states, 1)


class Experts(nn.Module):
    """It loops over as many experts as there are tokens in the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(torch.randn(8, 8) for _ in range(13))
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.linear(sum(x_BTD @ expert for expert in self.experts))


class Force(nn.Module):
    """It differentiates inside forward, so it runs only with gradients enabled."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD.detach().requires_grad_()
        (force_BTD,) = torch.autograd.grad(self.linear(x_BTD).sin().sum(), x_BTD)
        return self.linear(force_BTD)


@pytest.mark.parametrize(("kind", "size"), [(Scan, 13), (Scan, 5), (Experts, 13), (Force, 13)])
def test_a_block_that_loops_over_the_tokens_is_not_compiled(kind: Any, size: int) -> None:
    model = nn.Sequential(kind(), kind())
    report = swap(model, level="blocks", backend="eager", batch=torch.randn(2, size, 8))
    reason = f"its forward loops over {size} elements of an input: each size would need a graph of its own"
    loops = [module.name for module in report.skipped if module.reason == reason]
    assert loops == (["0", "1"] if (kind, size) == (Scan, 13) else [])


def test_a_block_that_fills_a_list_is_repeated() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    report = swap(nn.Sequential(block, block), level="blocks", backend="eager", batch=torch.randn(4, 8))
    assert [site.name for site in report.sites] == ["0"]


def test_one_block_in_four_may_have_other_sizes() -> None:
    widths = 8, 8, 8, 16  # the last one is wider
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, width), nn.GELU()) for width in widths))
    report = swap(model, level="blocks", backend="eager", batch=torch.randn(4, 8))
    assert [site.name for site in report.sites if site.rule == "block"] == ["0", "1", "2"]
    unswap(model)
    report = swap(model[1:], level="blocks", backend="eager", batch=torch.randn(4, 8))
    assert report.sites == (), "one in three"


def test_linear_layers_in_a_list_are_no_blocks() -> None:
    with pytest.warns(UserWarning, match="changed nothing"):
        assert swap(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), level="blocks", verify=False).sites == ()
    report = swap(Feedforward(), level="blocks", compress="int8", verify=False)
    assert report.notes == ("there are no repeated blocks: level layers, nothing compressed",)


@pytest.mark.parametrize(("rates", "level"), [((0.1, 0.1), "blocks"), ((0.1, 0.2), "layers")])
def test_the_default_takes_layers_for_blocks_with_several_rates(rates: tuple[float, ...], level: str) -> None:
    """Each rate would be a constant of its own graph, as in a linear schedule of stochastic depth."""
    model = nn.Sequential(*(Feedforward() for _ in rates))
    for block, rate in zip(model, rates, strict=True):
        block.rate = rate  # type: ignore[assignment]
    assert swap(model, verify=False).level == level


def test_a_list_of_blocks_is_no_layer_that_nearly_fits() -> None:
    report = swap(nn.Sequential(*(Feedforward() for _ in range(4))), level="layers", batch=torch.randn(4, 8))
    assert (len(report.sites), report.skipped) == (4, ())


@pytest.mark.usefixtures("inductor_runs_op_by_op")
def test_the_default_takes_layers_if_no_block_passes() -> None:
    model = nn.Sequential(OtherWhenCompiled(), OtherWhenCompiled())
    x = torch.randn(4, 8)
    expected = model(x)
    report = swap(model, batch=x)
    assert report.level == "layers"
    assert [site.name for site in report.sites] == ["0.feedforward", "1.feedforward"]
    assert [(module.name, module.kind) for module in report.skipped] == [
        ("0", "OtherWhenCompiled"),
        ("1", "OtherWhenCompiled"),
    ]
    assert all(module.reason.startswith("its error is ") for module in report.skipped)
    torch.testing.assert_close(model(x), expected)


class OutsideTheGraph(nn.Module):
    """A block that Dynamo does not trace, so that fusing it saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.feedforward = Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        return self.added(x)

    @torch._dynamo.disable
    def added(self, x: Tensor) -> Tensor:
        return x + self.feedforward(x)


class SomeFail(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(Gated(), Gated()), nn.Sequential(*(OtherWhenCompiled() for _ in range(4))))


@pytest.mark.usefixtures("inductor_runs_op_by_op")
@pytest.mark.parametrize("kind", [lambda: nn.Sequential(OutsideTheGraph(), OutsideTheGraph()), SomeFail])
def test_the_default_takes_layers_if_they_save_more_than_the_blocks_that_pass(kind: Any) -> None:
    x = torch.randn(64, 8)
    report, layers = (swap(kind(), level=level, batch=x) for level in ("auto", "layers"))
    assert (report.level, report.saved_after) == ("layers", layers.saved_after)


class Attending(Feedforward):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.attention(x))))


@pytest.mark.parametrize("probability", [0.0, 0.5])
def test_a_hook_in_a_block_retains_a_gradient(probability: float) -> None:
    blocks = nn.Sequential(Attending(), Attending()).train()
    for block in blocks.modules():
        block.dropout = probability
    outputs: list[Tensor] = []

    def retain(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    assert swap_at("blocks", blocks).sites
    blocks[0].up.register_forward_hook(retain)
    blocks(torch.randn(6, 8)).square().sum().backward()
    assert [output.grad is not None for output in outputs] == [True]


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_call_that_returns_hidden_states_leaves_later_calls_whole(backend: str, reentrant: bool | None) -> None:
    """The first such call gives a model of transformers hooks for good, at which Dynamo breaks graphs."""
    plain, swapped = pair("llama", "blocks")
    unswap(swapped)
    swap_at("blocks", swapped, backend=backend)
    batch = batch_for("llama")
    before = saved_bytes(swapped, **batch)
    for model in (plain, swapped):
        model.set_attn_implementation("eager")
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    results = [model(**batch, output_hidden_states=True, output_attentions=True) for model in (plain, swapped)]
    for name in ("hidden_states", "attentions"):
        assert len(results[1][name]) > 1
        torch.testing.assert_close(results[1][name], results[0][name])
    for result in results:
        (result.loss + result.hidden_states[1].square().mean()).backward()
    assert_same_values(*({name: value.grad for name, value in model.named_parameters()} for model in (plain, swapped)))
    swapped.set_attn_implementation("sdpa")
    swapped.gradient_checkpointing_disable()
    counters.clear()
    assert saved_bytes(swapped, **batch) == before
    assert not counters["graph_break"]
