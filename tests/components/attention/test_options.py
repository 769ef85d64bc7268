"""Every option and input of multi-head attention, alone and with others, on every kernel."""

import copy
import itertools
import math
import pickle
import re
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from fuselayers import build
from fuselayers.components import (
    LayerNorm,
    MultiHeadAttention,
    RotaryPosition,
    block_diagonal_mask,
    initialise,
)
from fuselayers.ops import dropout
from tests.components.attention import contract
from tests.components.attention.calls import (
    HEADS,
    HIDDEN_DIM,
    INPUTS,
    MEMORY,
    TOKENS,
    assert_as_written_out,
    inputs_of,
    made,
    padding,
)
from tests.components.attention.reference import reference
from tests.components.compare import run
from tests.selection import every_value

OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {"num_kv_heads": 2},
    "one kv head": {"num_kv_heads": 1, "head_dim": 4},
    "no bias": {"bias": False},
    "out bias": {"bias": False, "out_bias": True},
    "no out bias": {"out_bias": False},
    "window": {"window": 3},
    "qk_norm": {"qk_norm": "rms_norm", "qk_norm_eps": 0.1},
    "soft_cap": {"soft_cap": 0.7},
    "sinks": {"sinks": True},
    "scale": {"scale": 0.3},
    "both ways": {"causal": False},
}


PAIRS = [
    *((name,) for name in OPTIONS),
    *(pair for pair in itertools.combinations(OPTIONS, 2) if set(pair) != {"grouped", "one kv head"}),
]
# Each pair of options meets one input after the other.
CASES = [(pair, ((), *((name,) for name in INPUTS), INPUTS)[number % 6]) for number, pair in enumerate(PAIRS)]
# Each option meets each input; every day it does so beside another option, if a pair has both.
_MET = {(name, inputs) for names, inputs in CASES for name in names}
ALONE = [(name, inputs) for name in OPTIONS for inputs in (*((one,) for one in INPUTS), INPUTS)]


@pytest.mark.parametrize(
    ("names", "inputs"),
    [
        *CASES,
        *(
            pytest.param((name,), inputs, marks=pytest.mark.slow if (name, inputs) in _MET else ())
            for name, inputs in ALONE
        ),
    ],
    ids=str,
)
def test_options_and_inputs_together(names: tuple[str, ...], inputs: tuple[str, ...]) -> None:
    options = {key: value for name in names for key, value in OPTIONS[name].items()}
    assert_as_written_out(made(**options), inputs, kernels=("auto", "plain"))


@pytest.mark.parametrize("inputs", [(), ("key_padding_mask",), ("bias", "mask")], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2, "sinks": True}, {"qk_norm": "rms_norm", "soft_cap": 0.7}])
def test_cross_attention(options: dict[str, Any], inputs: tuple[str, ...]) -> None:
    assert_as_written_out(made(causal=False, **options), inputs, kernels=("auto", "plain"), memory=True)


def test_cross_attention_calls_what_was_put_on_the_projection() -> None:
    layer = made(causal=False)
    x, memory = (torch.randn(2, n, HIDDEN_DIM, dtype=torch.float64) for n in (TOKENS, MEMORY))
    doubled = copy.deepcopy(layer)
    with torch.no_grad():
        doubled.qkv.weight.mul_(2)
        doubled.qkv.bias.mul_(2)
    hooked = copy.deepcopy(layer)
    hooked.qkv.register_forward_hook(lambda module, args, output: 2 * output)
    assert not torch.allclose(hooked(x, memory=memory), layer(x, memory=memory))
    torch.testing.assert_close(hooked(x, memory=memory), doubled(x, memory=memory))


BLIND: list[dict[str, Any]] = [{}, {"sinks": True}, {"causal": False, "window": 2}, {"num_kv_heads": 2}]


@pytest.mark.parametrize(
    ("kernel", "options", "biased"),
    # Flex traces each of them.
    [*itertools.product(("auto", "plain"), BLIND, (False, True)), *every_value(("flex",), BLIND, (False, True))],
    ids=str,
)
@pytest.mark.usefixtures("flex_with_gradients")
def test_a_token_with_nothing_to_look_at(kernel: str, options: dict[str, Any], biased: bool) -> None:
    layer = made(kernel=kernel, **options)
    real_BT = torch.tensor([[False] * 4, [True] * 4])
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2] = False
    bias = inputs_of(("bias",))["bias"][:, :4, :4] if biased else None
    x = torch.randn(2, 4, HIDDEN_DIM, dtype=torch.float64)
    got = run(lambda x: layer(x, key_padding_mask=real_BT, mask=mask, bias=bias), [x])
    nothing = torch.cat((got["output 0"][0], got["output 0"][1, 2:3]))
    torch.testing.assert_close(nothing, layer.out.bias.expand_as(nothing))
    assert got["gradient of input 0"][0].eq(0).all()
    assert got["gradient of input 0"].isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())
    parts = got["gradient of input 0"][1]
    assert parts[:2].abs().sum() > 0


@pytest.mark.parametrize(
    "options", [{}, {"num_kv_heads": 2, "causal": False}, {"soft_cap": 0.7}, {"sinks": True, "window": 3}]
)
def test_dropout_falls_on_the_probabilities_of_the_keys(options: dict[str, Any]) -> None:
    layer = made(dropout=0.4, **options)
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    torch.manual_seed(2)
    kept = dropout(torch.ones(2, HEADS, TOKENS, TOKENS, dtype=torch.float64), 0.4)
    torch.manual_seed(2)
    torch.testing.assert_close(layer(x), reference(layer, x, kept=kept))
    torch.testing.assert_close(layer.eval()(x), reference(layer, x))


def test_packed_documents_are_as_if_alone() -> None:
    layer = made(num_kv_heads=2)
    x = torch.randn(1, 7, HIDDEN_DIM, dtype=torch.float64)
    packed = layer(x, mask=block_diagonal_mask(torch.tensor([[3, 3, 3, 1, 1, 1, 1]])))
    torch.testing.assert_close(packed, torch.cat((layer(x[:, :3]), layer(x[:, 3:])), dim=1))


def test_sinks_start_at_zero_also_after_the_meta_device() -> None:
    layer = MultiHeadAttention(HIDDEN_DIM, num_heads=HEADS, sinks=True)
    assert layer.sinks is not None
    assert layer.sinks.tolist() == [0.0] * HEADS
    with torch.device("meta"):
        layer = MultiHeadAttention(HIDDEN_DIM, num_heads=HEADS, sinks=True, qk_norm="rms_norm")
    layer.to_empty(device="cpu")
    assert layer.sinks is not None
    with torch.no_grad():
        layer.sinks.fill_(math.nan)
    initialise(layer, "gpt2", num_layers=1)
    assert layer.sinks.tolist() == [0.0] * HEADS
    assert layer(torch.randn(1, 3, HIDDEN_DIM)).isfinite().all()


EVERYTHING: dict[str, Any] = {"num_kv_heads": 2, "window": 3, "qk_norm": "rms_norm", "sinks": True, "scale": 0.4}


@pytest.mark.parametrize(
    "options",
    [pytest.param(EVERYTHING, marks=pytest.mark.slow), {**EVERYTHING, "soft_cap": 0.7, "dropout": 0.3}],
    ids=["everything", "and soft_cap and dropout"],
)
def test_one_graph_for_a_compiler(options: dict[str, Any]) -> None:
    layer = made(**options)
    inputs = inputs_of(INPUTS)
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x, **inputs), backend="aot_eager", fullgraph=True)
    expected, got = run(lambda x: layer(x, **inputs), [x]), run(compiled, [x])
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, msg=lambda text, name=name: f"{name}: {text}")


def test_one_graph_for_a_compiler_with_a_memory() -> None:
    x, memory = (torch.randn(2, n, HIDDEN_DIM, dtype=torch.float64) for n in (TOKENS, MEMORY))
    torch._dynamo.reset()
    cross = made(causal=False, sinks=True)
    compiled = torch.compile(cross, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, memory=memory), cross(x, memory=memory))


@pytest.mark.parametrize("kernel", ["auto", "plain"])
@pytest.mark.parametrize("options", [EVERYTHING, {**EVERYTHING, "soft_cap": 0.7}, {"causal": False}], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(autocast: bool, options: dict[str, Any], kernel: str) -> None:
    layer = made(kernel=kernel, **options)
    inputs = inputs_of(INPUTS)
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    expected = layer(x, **inputs)
    if autocast:
        with torch.autocast("cpu", torch.bfloat16):
            got = layer.float()(x.float(), **inputs)
    else:
        got = layer.bfloat16()(x.bfloat16(), **inputs)
    assert got.dtype == torch.bfloat16
    error = (got.double() - expected).abs().max() / expected.abs().max()
    assert error < 0.03
    got.float().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_copies() -> None:
    layer = made(**EVERYTHING, soft_cap=0.7)
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(x), layer(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"window": 0}, "window must be at least 1, got 0"),
        ({"soft_cap": 0.0}, "soft_cap must be above 0, got 0.0"),
        ({"scale": -1.0}, "scale must be above 0, got -1.0"),
        ({"qk_norm_eps": -1.0}, "qk_norm_eps must be at least 0, got -1.0"),
        ({"qk_norm": "rms"}, "no norm 'rms'; did you mean 'rms_norm'?"),
        ({"kernel": "sdp"}, "no kernel 'sdp'; did you mean 'sdpa'? there are: auto, flex, plain, sdpa"),
        (
            {"kernel": "flex", "dropout": 0.1},
            "the kernel 'flex' cannot drop probabilities; take 'auto' or 'plain', or dropout=0",
        ),
        (
            {"kernel": "sdpa", "soft_cap": 1.0},
            "the kernel 'sdpa' cannot cap scores; take 'auto', or leave soft_cap out",
        ),
    ],
)
def test_errors_of_the_constructor(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
        MultiHeadAttention(HIDDEN_DIM, num_heads=HEADS, **options)


@pytest.mark.parametrize(
    ("options", "inputs", "text"),
    [
        (
            {},
            {"bias": torch.zeros(1, 3, 3)},
            "bias must be floating and [6, 3, 3] (heads, queries, keys), got torch.float32 [1, 3, 3]",
        ),
        (
            {},
            {"mask": torch.ones(2, 3, 3)},
            "mask must be torch.bool and broadcastable to [2, 6, 3, 3], True where a query may look at a key, "
            "got torch.float32 [2, 3, 3]",
        ),
        (
            {},
            {"mask": torch.ones(1, 2, 6, 3, 3, dtype=torch.bool)},
            "mask must be torch.bool and broadcastable to [2, 6, 3, 3], True where a query may look at a key, "
            "got torch.bool [1, 2, 6, 3, 3]",
        ),
        (
            {},
            {"mask": create_block_mask(lambda b, h, t, s: t >= s, None, None, 3, 3, device="cpu")},
            "a BlockMask needs the kernel 'flex', this attention has 'auto'; or pass a tensor",
        ),
        (
            {"kernel": "flex"},
            {"mask": create_block_mask(lambda b, h, t, s: t >= s, None, None, 3, 4, device="cpu")},
            "a BlockMask must be for [3, 3] tokens, got [3, 4]",
        ),
        (
            {"causal": True},
            {"memory": torch.zeros(2, 4, 12)},
            "attention that is causal cannot look at a memory; build it without that",
        ),
        (
            {"window": 2},
            {"memory": torch.zeros(2, 4, 12)},
            "attention that is windowed cannot look at a memory; build it without that",
        ),
        ({}, {"memory": torch.zeros(1, 4, 12)}, "memory must be [2, S, 12], got [1, 4, 12]"),
        (
            {},
            {"memory": torch.zeros(2, 4, 12), "rotate": RotaryPosition().rotate},
            "rotate turns queries and keys of the same tokens; leave it out where there is a memory",
        ),
        (
            {},
            {"memory": torch.zeros(2, 4, 12), "key_padding_mask": torch.ones(2, 3, dtype=torch.bool)},
            "key_padding_mask must be torch.bool [2, 4] to fit the memory [2, 4, 12], True for a real token, "
            "got torch.bool [2, 3]",
        ),
        (
            {},
            {"key_padding_mask": torch.ones(2, 3)},
            "key_padding_mask must be torch.bool [2, 3] to fit x [2, 3, 12], True for a real token, "
            "got torch.float32 [2, 3]",
        ),
    ],
)
def test_errors_of_a_call(options: dict[str, Any], inputs: dict[str, Any], text: str) -> None:
    layer = MultiHeadAttention(HIDDEN_DIM, num_heads=HEADS, **options)
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        layer(torch.zeros(2, 3, HIDDEN_DIM), **inputs)


def test_a_config_and_its_layers_take_the_options() -> None:
    changed = ["attention.qk_norm=layer_norm", "attention.sinks=true"]
    layers = ["model.layers=[{at: '1::2', attention: {window: 4}}]"]
    model = build("gpt_nano", [*changed, *layers, "attention.scale=0.2"])
    attentions = [block.attention for block in model.blocks]
    assert [attention.window for attention in attentions][:3] == [None, 4, None]
    for attention in attentions:
        assert isinstance(attention.k_norm, LayerNorm)
        assert (attention.scale, attention.sinks.shape) == (0.2, (attention.num_heads,))
    with pytest.raises(ValueError, match=r"^no attention\.kernel 'plan'; did you mean 'plain'\?"):
        build("gpt_nano", ["attention.kernel=plan"])


@pytest.mark.parametrize("memory", [False, True])
def test_one_compiled_graph_serves_padding_of_any_length(memory: bool) -> None:
    layer = made(causal=not memory)
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (5, 7, 9):
        x = torch.randn(2, tokens, HIDDEN_DIM, dtype=torch.float64)
        inputs = {"key_padding_mask": padding(tokens), **({"memory": x.flip(1)} if memory else {})}
        with torch._dynamo.config.patch(error_on_recompile=tokens > 5):
            torch.testing.assert_close(compiled(x, **inputs), layer(x, **inputs), rtol=1e-9, atol=1e-9)


def test_dropout_is_off_in_eval_mode() -> None:
    dropped, plain = made(dropout=0.4), made()
    plain.load_state_dict(dropped.state_dict())
    x = torch.randn(2, TOKENS, HIDDEN_DIM, dtype=torch.float64)
    assert not torch.allclose(dropped(x), plain(x), atol=1e-3)
    torch.testing.assert_close(dropped.eval()(x), plain(x))


def test_sequences_without_tokens() -> None:
    for kernel in ("sdpa", "plain"):
        contract.assert_no_tokens(MultiHeadAttention(HIDDEN_DIM, num_heads=6, num_kv_heads=2, kernel=kernel))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torch_jit_trace_of_dropped_probabilities() -> None:
    """As xFormers' tests traced its attentions, which compare a second trace, made without gradients."""
    attention = MultiHeadAttention(32, num_heads=4, dropout=0.3).train()
    traced = torch.jit.trace(attention, torch.randn(2, 5, 32))
    x = torch.randn(2, 5, 32)
    torch.manual_seed(3)
    got = traced(x)
    torch.manual_seed(3)
    torch.testing.assert_close(got, attention(x))
    assert not torch.equal(got, traced(x))
