"""The shipped architectures against `transformers`: the same outputs for the same weights."""

import re

import pytest
import torch
from torch import Tensor, nn

from fuselayers.configs import build, choices
from fuselayers.configs.hugging_face import FAMILIES, load_hugging_face
from tests.configs.hugging_face.twins import TWINS, assert_same_outputs, small_state, theirs

# Published counts, and counts by `transformers` of the published sizes.
PARAMETERS = {
    "bert_base": 109_514_298,
    "bert_large": 335_174_458,
    "bloom_560m": 559_214_592,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gpt2_large": 774_030_080,
    "gpt2_medium": 354_823_168,
    "gpt2_small": 124_439_808,
    "gpt2_xl": 1_557_611_200,
    "gpt_neox_20b": 20_554_567_680,
    "llama3_2_1b": 1_235_814_400,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "mixtral_8x7b": 46_702_792_704,
    "opt_125m": 125_239_296 - 2 * 768,  # rows of positions that no token uses
    "opt_1_3b": 1_315_758_080 - 2 * 2048,
    "phi_2": 2_779_683_840,
    "pythia_160m": 162_322_944,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_8b": 8_190_735_360,
    "t5_base": 222_903_552,
    "t5_small": 60_506_624,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
}
# Models with sizes of our own, for which there are no published counts.
OWN = {"gpt_nano", "llama_tiny", "hierarchical_vision"}
# Models of full size, on the meta device: every third model runs daily.
PUBLISHED_MODELS = [
    pytest.param(name, marks=pytest.mark.slow if number % 3 else ()) for number, name in enumerate(PARAMETERS)
]


def test_every_shipped_model_is_compared_or_counted() -> None:
    assert {name for name in choices("model") if name.endswith("_tiny")} <= TWINS.keys() | OWN
    assert set(choices("model")) == TWINS.keys() | PARAMETERS.keys() | OWN
    assert {twin.module for twin in TWINS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", PUBLISHED_MODELS)
def test_number_of_parameters(name: str) -> None:
    with torch.device("meta"):
        assert build(name, ["fusion=off"]).num_parameters() == PARAMETERS[name]


@pytest.mark.parametrize("name", TWINS)
def test_the_same_outputs_for_the_same_weights(name: str) -> None:
    twin = TWINS[name]
    other = theirs(twin)
    model = build(name, ["fusion=off", *twin.overrides]).eval()
    load_hugging_face(model, other.state_dict(), family=twin.family)
    unused = 2 * 32 if twin.family == "opt" else 0  # rows of positions
    assert model.num_parameters() == sum(parameter.numel() for parameter in other.parameters()) - unused
    assert_same_outputs(model, other, twin.family)


@pytest.fixture
def gpt2() -> nn.Module:
    return build("gpt2_tiny", ["fusion=off", "model.num_layers=1"])


def test_the_callers_weights_stay_as_they_are(gpt2: nn.Module) -> None:
    state = {name: tensor.clone() for name, tensor in small_state(gpt2).items()}
    other = build("gpt2_tiny", ["fusion=off", "model.num_layers=1"])
    load_hugging_face(other, state, family="gpt2")
    for name, tensor in gpt2.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, small_state(gpt2)[name]) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["gpt2_tiny", "bert_tiny", "t5_tiny", "llama3_2_1b"])
def test_repeated_weights_must_be_equal(name: str) -> None:
    family, overrides = TWINS[name].family, [*TWINS[name].overrides, "fusion=off"]
    state = small_state(build(name, overrides), family)
    model = build(name, overrides)
    load_hugging_face(model, state, family=family)
    for repeated, other in FAMILIES[family].weights.repeated.items():
        assert torch.equal(state[repeated], state[other])
        before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        text = f"{repeated} must equal {other}, since both are the same weight"
        with pytest.raises(ValueError, match=f"^the state_dict does not fit this {family}: {re.escape(text)}$"):
            load_hugging_face(model, {**state, repeated: state[other] + 1}, family=family)
        assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
        # A file may leave the repeated tensor out.
        load_hugging_face(model, {key: tensor for key, tensor in state.items() if key != repeated}, family=family)


@pytest.mark.parametrize(
    ("empty", "name", "advice"),
    [
        ("model", "blocks.0.attention.qkv.weight", "call its to_empty first"),
        ("state_dict", "transformer.h.0.attn.c_attn.weight", "load its weights first"),
    ],
)
def test_nothing_is_loaded_where_there_are_no_values(gpt2: nn.Module, empty: str, name: str, advice: str) -> None:
    state = small_state(gpt2)
    if empty == "model":
        gpt2.to("meta")
    else:
        state = {key: tensor.to("meta") for key, tensor in state.items()}
    text = f"{name} of the {empty} is on the meta device, where there are no values; {advice}"
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        load_hugging_face(gpt2, state, family="gpt2")


@pytest.mark.parametrize(
    ("changed", "value", "said"),
    [
        ("transformer.ln_f.bias", None, "norm.bias is missing"),
        ("transformer.wpe.weight", torch.zeros(8, 32), "position.table.weight must be [64, 32], got [8, 32]"),
        ("transformer.h.0.attn.rotary", torch.zeros(3), "transformer.h.0.attn.rotary does not belong to the model"),
        (
            "lm_head.weight",
            torch.ones(256, 32),
            "lm_head.weight must equal transformer.wte.weight, since both are the same weight",
        ),
        ("transformer.h.7.ln_1.bias", torch.zeros(32), "blocks.7.residual.norms.0.bias does not belong to the model"),
    ],
)
def test_nothing_is_copied_where_something_does_not_fit(
    gpt2: nn.Module, changed: str, value: Tensor | None, said: str
) -> None:
    state = small_state(build("gpt2_tiny", ["fusion=off", "model.num_layers=1"]))
    if value is None:
        del state[changed]
    else:
        state[changed] = value
    before = {name: tensor.clone() for name, tensor in gpt2.state_dict().items()}
    text = f"^the state_dict does not fit this gpt2: {re.escape(said)}$"
    with pytest.raises(ValueError, match=text):
        load_hugging_face(gpt2, state, family="gpt2")
    assert all(torch.equal(tensor, before[name]) for name, tensor in gpt2.state_dict().items())
