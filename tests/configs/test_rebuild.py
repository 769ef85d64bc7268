import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components import MLP, Choice, FusedMLP, GatedMLP, compare_weights, register
from fuselayers.configs import Config, FusionConfig, RebuildError, RebuildWarning, build, compose, rebuild
from fuselayers.partition import FusedModule, fuse
from tests.components.compare import assert_same_step

TINY = ["model.hidden_dim=16", "model.num_layers=3", "model.context_length=8", "model.vocab_size=31", "fusion=off"]
HEADS = ["attention.num_heads=4"]
# Tokens and targets.
BATCH = torch.randint(31, (2, 2, 7), generator=torch.Generator().manual_seed(1)).unbind()


def tiny(*overrides: str, model: str = "gpt_nano") -> Any:
    """A small model with weights unlike those of any initialisation."""
    grouped = ["attention.num_kv_heads=2"] if model == "llama_tiny" else []
    built = build(overrides=[f"model={model}", *TINY, *HEADS, *grouped, *overrides])
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(mean=0.1, std=0.3)
    return built


def report_of(model: nn.Module, overrides: list[str]) -> tuple[Any, str]:
    """The rebuilt model, and the text of its one warning."""
    with pytest.warns(RebuildWarning) as caught:
        rebuilt = rebuild(model, overrides)
    (warning,) = caught
    assert warning.filename == __file__
    return rebuilt, str(warning.message)


@pytest.fixture(autouse=True)
def _no_warning_unseen() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RebuildWarning)
        yield


@pytest.mark.parametrize("scope", ["none", "model"])
def test_only_the_model_itself_knows_its_config(scope: str) -> None:
    config = compose("gpt_nano", [*TINY[:-1], *HEADS, "fusion=eager", f"fusion.scope={scope}"])
    with torch.device("meta"):
        built: Any = build(config)
    assert built.built_from is config
    assert "built_from" not in "".join(built.state_dict())
    for module in built.modules():
        kept = {name for name, value in vars(module).items() if isinstance(value, (Config, FusionConfig, Choice))}
        assert kept == ({"built_from"} if module is built else set())


@pytest.mark.parametrize("scope", ["none", "model"])
def test_copies_know_it_too(scope: str) -> None:
    built = tiny("fusion=eager", f"fusion.scope={scope}", "model.num_layers=1")
    file = io.BytesIO()
    torch.save(built, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    for other in (copy.deepcopy(built), pickle.loads(pickle.dumps(built)), loaded):
        assert other.built_from == built.built_from
        models = (rebuild(model, ["fusion=off"], strict=True) for model in (built, other))
        assert_same_step(*models, *BATCH)


# Post-norm and pre-norm, without and with grouped heads.
@pytest.mark.parametrize(
    ("model", "first", "second"), [("bert_base", "mlp", "fused_mlp"), ("llama_tiny", "fused_mlp", "mlp")]
)
def test_an_mlps_implementation_keeps_every_weight_and_every_number(model: str, first: str, second: str) -> None:
    built = tiny(f"feedforward={first}", "feedforward.dropout=0.2", model=model)
    rebuilt: Any = rebuild(built, [f"feedforward={second}"], strict=True)
    kinds = {"mlp": MLP, "fused_mlp": FusedMLP}
    assert type(rebuilt.blocks[0].feedforward) is kinds[second]
    assert type(built.blocks[0].feedforward) is kinds[first]
    assert_same_step(built, rebuilt, *BATCH)


@pytest.mark.parametrize("scope", [pytest.param("block", marks=pytest.mark.slow), "model"])
def test_fusion_and_back_keeps_every_weight_and_every_number(scope: str) -> None:
    plain = tiny("model.num_layers=1")
    fused = rebuild(plain, ["fusion=eager", f"fusion.scope={scope}"], strict=True)
    fused_names = [name for name, module in fused.named_modules() if isinstance(module, FusedModule)]
    assert fused_names == {"block": ["blocks.0"], "model": [""]}[scope]
    assert_same_step(plain, fused, *BATCH)
    assert_same_step(plain, rebuild(fused, ["fusion=off"], strict=True), *BATCH)


def test_a_gated_mlp_reports_what_is_new_and_what_was_left_behind() -> None:
    built = tiny("feedforward=mlp")
    rebuilt, text = report_of(built, ["feedforward=gated_mlp"])
    assert isinstance(rebuilt.blocks[2].feedforward, GatedMLP)
    assert text.splitlines() == [
        "28 of 37 weights carried over; what did not:",
        "  blocks.0-2.feedforward: gate.weight, up.weight, down.weight new; "
        "up.weight, up.bias, down.weight, down.bias left behind",
        "New weights, and weights of another shape, are initialised.",
    ]
    assert torch.equal(rebuilt.token.weight, built.token.weight)


@pytest.mark.parametrize("override", ["norm=layer_norm", "norm.unit_offset=false"])
def test_weights_that_are_scales_less_one_do_not_become_scales(override: str) -> None:
    built = build("gemma2_tiny", ["fusion=off", "model.num_layers=1"])
    with pytest.raises(RebuildError):
        rebuild(built, [override], strict=True)
    rebuilt, text = report_of(built, [override])
    new = "weight, norm.bias new" if override == "norm=layer_norm" else "weight new"
    assert f"  norm.{new}; norm.weight left behind" in text.splitlines()
    assert rebuilt.norm.weight.eq(1).all()
    # A scale less one begins at zero, so the output is the same. Carried weights would make all of it zero.
    tokens_BT = torch.arange(5)[None]
    if override == "norm.unit_offset=false":
        torch.testing.assert_close(rebuilt(tokens_BT), built(tokens_BT))


def test_blocks_carry_by_their_number() -> None:
    built = tiny()
    fewer, text = report_of(built, ["model.num_layers=1"])
    assert text.splitlines()[:2] == [
        "16 of 16 weights carried over; what did not:",
        "  blocks.1-2.attention: qkv.weight, qkv.bias, out.weight, out.bias left behind",
    ]
    more, text = report_of(built, ["model.num_layers=5"])
    assert "  blocks.3-4.feedforward: up.weight, up.bias, down.weight, down.bias new" in text.splitlines()
    for name, value in built.state_dict().items():
        assert torch.equal(more.state_dict()[name], value), name
        assert name not in fewer.state_dict() or torch.equal(fewer.state_dict()[name], value), name


def test_strict_raises_before_anything_is_made() -> None:
    built = tiny()
    before = torch.get_rng_state()
    with pytest.raises(RebuildError) as caught:
        rebuild(built, ["norm=rms_norm"], strict=True)
    assert caught.value.carried.left[-1] == "norm.bias"
    assert str(caught.value).splitlines()[1:] == [
        "  blocks.0-2.residual.norms: 0.bias, 1.bias left behind",
        "  norm.bias left behind",
        "Nothing was built; rebuild without strict=True initialises the other weights.",
    ]
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_new_is_initialised_as_build_does_it() -> None:
    built = tiny("feedforward=mlp", "model.num_layers=1")
    torch.manual_seed(5)
    expected: Any = build(built.built_from, ["feedforward=gated_mlp", "model.num_layers=4"])
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rebuilt, _ = report_of(built, ["feedforward=gated_mlp", "model.num_layers=4"])
    assert torch.equal(torch.get_rng_state(), before)
    carried = set(compare_weights(built, rebuilt).carried)
    assert carried
    for name, value in rebuilt.state_dict().items():
        source = built if name in carried else expected
        assert torch.equal(value, source.state_dict()[name]), name
    # Weights of the last layer of a branch are smaller, by the number of layers of the new model.
    deviation = rebuilt.blocks[3].feedforward.down.weight.std().item()
    assert deviation == pytest.approx(0.02 / 8**0.5, rel=0.2)


def test_a_weight_keeps_its_dtype_and_what_is_new_has_that_of_the_first_weight() -> None:
    built = tiny("feedforward=mlp", "norm=rms_norm").bfloat16()
    for block in built.blocks:
        block.residual.double()
    rebuilt, _ = report_of(built, ["norm=layer_norm", "feedforward=gated_mlp", "model.tie_embeddings=false"])
    dtypes = {name: value.dtype for name, value in rebuilt.state_dict().items()}
    doubles = {name for name, dtype in dtypes.items() if dtype == torch.float64}
    assert doubles == {name for name in built.state_dict() if ".residual." in name}
    assert {dtypes[name] for name in dtypes.keys() - doubles} == {torch.bfloat16}
    assert torch.equal(rebuilt.blocks[1].attention.qkv.weight, built.blocks[1].attention.qkv.weight)
    built.to("meta")
    assert all(value.is_meta for value in report_of(built, ["norm=layer_norm"])[0].parameters())


def test_modes_are_those_of_the_modules_of_the_same_name() -> None:
    built = tiny("feedforward=mlp")
    built.blocks[1].eval()
    rebuilt, _ = report_of(built, ["feedforward=gated_mlp", "model.num_layers=4"])
    modes = {name: module.training for name, module in rebuilt.named_modules()}
    assert {name for name, training in modes.items() if not training} == {
        name for name in modes if name == "blocks.1" or name.startswith("blocks.1.")
    }
    assert not rebuild(built.eval(), ["fusion=eager"]).training


@pytest.mark.usefixtures("own_components")
def test_values_are_computed_only_for_new_weights() -> None:
    devices: list[str] = []

    @register("feedforward", "recorded")
    class Recorded(MLP):
        def __init__(self, hidden_dim: int) -> None:
            super().__init__(hidden_dim)
            self.again = self.up.weight  # a tie
            devices.append(self.up.weight.device.type)

        def reset_parameters(self) -> None:
            nn.init.normal_(self.again)

    built = tiny("feedforward=recorded").bfloat16()
    devices.clear()
    same = rebuild(built, ["attention.dropout=0.2"], strict=True)
    assert set(devices) == {"meta"}
    for name, value in built.state_dict().items():
        assert torch.equal(same.state_dict()[name], value), name
    for block in same.blocks:  # type: ignore[union-attr]
        assert block.feedforward.again is block.feedforward.up.weight
    report_of(built, ["norm=rms_norm", "norm.eps=1", "model.num_layers=4"])
    assert "cpu" in devices


def test_frozen_weights_stay_frozen_and_new_ones_are_trained() -> None:
    built = tiny("feedforward=mlp")
    built.requires_grad_(False)
    built.token.weight.requires_grad_(True)
    same = rebuild(built, ["feedforward=fused_mlp"])
    assert [name for name, value in same.named_parameters() if value.requires_grad] == ["token.weight"]
    rebuilt, _ = report_of(built, ["feedforward=gated_mlp"])
    trained = {name for name, value in rebuilt.named_parameters() if value.requires_grad}
    assert trained == {"token.weight", *(name for name, _ in rebuilt.named_parameters() if ".feedforward." in name)}


@pytest.mark.usefixtures("own_components")
def test_buffers_that_a_constructor_computes_are_computed() -> None:
    @register("feedforward", "shifted")
    class Shifted(MLP):
        def __init__(self, hidden_dim: int, *, shift: float = 1.0, loose: float = 1.0) -> None:
            super().__init__(hidden_dim)
            self.shift = shift
            self.register_buffer("saved", torch.empty(3))
            self.register_buffer("made", torch.empty(3), persistent=False)
            self.reset_parameters()
            self.loose = torch.full((3,), loose)

        def reset_parameters(self) -> None:
            self.saved.fill_(self.shift)
            self.made.fill_(self.shift)

    built = tiny("feedforward=shifted")
    built.blocks[0].feedforward.saved.fill_(7.0)
    rebuilt: Any = rebuild(built, ["feedforward.shift=2", "feedforward.loose=3"], strict=True)
    layer = rebuilt.blocks[0].feedforward
    assert (layer.saved.tolist(), layer.made.tolist(), layer.loose.tolist()) == ([7.0] * 3, [2.0] * 3, [3.0] * 3)
    assert_same_step(built, rebuilt, *BATCH)
    built.bfloat16().blocks[0].feedforward.made = torch.ones(3)
    rebuilt = rebuild(built, ["feedforward.shift=2"], strict=True)
    assert rebuilt.blocks[0].feedforward.made.dtype == torch.float32
    assert rebuilt.blocks[1].feedforward.made.dtype == torch.bfloat16


def test_a_model_partly_on_the_meta_device_is_refused() -> None:
    built = tiny()
    built.blocks[1].to("meta")
    text = (
        r"^blocks\.1\.\S+ is on the meta device, where there are no values, and other weights are not; load its values"
    )
    with pytest.raises(ValueError, match=text):
        rebuild(built, ["feedforward=mlp"])


def test_rebuild_takes_the_config_of_a_model_that_has_none() -> None:
    built = tiny("feedforward=mlp")
    config = built.built_from
    del built.built_from
    rebuilt: Any = rebuild(built, ["feedforward=fused_mlp"], config=config, strict=True)
    assert_same_step(built, rebuilt, *BATCH)
    assert rebuilt.built_from.feedforward.name == "fused_mlp"


@pytest.mark.parametrize("wrap", [lambda model: model.blocks[0], nn.Sequential, torch.compile, fuse])
def test_a_part_or_a_wrapper_of_a_model_has_no_config(wrap: Any) -> None:
    built = tiny()
    wrapped = wrap(built)
    if isinstance(wrapped, FusedModule):
        assert compare_weights(rebuild(wrapped), built).complete
        return
    with pytest.raises(ValueError, match="has no config, since build did not make it; pass the model") as caught:
        rebuild(wrapped, ["feedforward=mlp"])
    assert str(caught.value).startswith(f"this {type(wrapped).__name__} has")
    assert str(caught.value).endswith("not a wrapper or a submodule of it, or its config with config=")
