import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fuselayers.components import GatedMLP
from fuselayers.partition import fuse
from tests.components.compare import randomise, run


class Pair(nn.Module):
    """A parent, so that the keys have a prefix."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.ff = GatedMLP(5, width=7, **options)  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.ff(self.first(x))


def twins(**options: object) -> tuple[Pair, Pair]:
    split, packed = randomise(Pair(**options)), Pair(packed=True, **options)
    packed.load_state_dict(split.state_dict())
    assert isinstance(split, Pair)
    return split, packed


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("activation", "backend"),
    [("silu", "auto"), ("gelu", "auto"), ("relu", "auto"), ("sigmoid", "auto"), (None, "auto"), ("sigmoid", "eager")],
)
def test_it_is_the_split_form(bias: bool, activation: str | None, backend: str) -> None:
    split, packed = (pair.double() for pair in twins(bias=bias, activation=activation))
    packed.ff.backend = backend
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    expected, got = run(split, [x]), run(packed, [x])
    for name in ("weight", "bias") if bias else ("weight",):
        halves = [expected.pop(f"gradient of ff.{part}.{name}") for part in ("gate", "up")]
        torch.testing.assert_close(got.pop(f"gradient of ff.gate_up.{name}"), torch.cat(halves), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("bias", [False, True])
def test_a_state_dict_has_the_keys_of_the_split_form_in_their_order(bias: bool) -> None:
    split, packed = twins(bias=bias)
    assert list(packed.state_dict()) == list(split.state_dict())
    assert list(packed.ff.state_dict()) == list(split.ff.state_dict())
    for name, value in split.state_dict().items():
        assert torch.equal(packed.state_dict()[name], value), name


@pytest.mark.parametrize("assign", [False, True])
def test_weights_load_both_ways_through_a_file(assign: bool) -> None:
    split, packed = twins(bias=True)
    for source, target in ((split, Pair(packed=True, bias=True)), (packed, Pair(bias=True))):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        given = torch.load(file)
        keys = list(given)
        target.load_state_dict(given, assign=assign)
        assert list(given) == keys
        x = torch.randn(2, 5)
        torch.testing.assert_close(target(x), source(x))


def test_both_parts_beside_the_packed_form_are_what_is_read() -> None:
    split, packed = twins()
    target = Pair(packed=True)
    target.load_state_dict(dict(target.named_parameters()) | split.state_dict())
    assert torch.equal(target.ff.gate_up.weight, packed.ff.gate_up.weight)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "ff.up.weight"\.'):
        target.load_state_dict(dict(packed.named_parameters()) | {"ff.up.weight": torch.zeros(7, 5)})


def test_what_is_missing_is_named_as_in_the_split_form_and_stays() -> None:
    split, packed = twins()
    given = split.state_dict()
    del given["ff.up.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "ff.up.weight"\.'):
        packed.load_state_dict(given)
    given["ff.gate.weight"] = torch.full((7, 5), 2.0)
    before = packed.ff.gate_up.weight.detach().clone()
    assert packed.load_state_dict(given, strict=False) == Pair().load_state_dict(given, strict=False)
    assert packed.ff.gate_up.weight[:7].eq(2.0).all()
    assert torch.equal(packed.ff.gate_up.weight[7:], before[7:])
    nothing = packed.load_state_dict({}, strict=False)
    assert {"ff.gate.weight", "ff.up.weight", "ff.down.weight"} <= set(nothing.missing_keys)
    assert "ff.gate_up.weight" not in nothing.missing_keys


@pytest.mark.parametrize("assign", [False, True])
def test_what_does_not_fit_and_what_is_too_much(assign: bool) -> None:
    split, packed = twins()
    given = {**split.state_dict(), "ff.up.weight": torch.zeros(6, 5), "ff.gate.bias": torch.zeros(7)}
    texts = []
    for pair in (split, packed):
        with pytest.raises(RuntimeError) as error:
            pair.load_state_dict(given, assign=assign)
        texts.append(str(error.value))
    for text in texts:
        assert 'Unexpected key(s) in state_dict: "ff.gate.bias"' in text
        assert re.search(
            r"size mismatch for ff.up.weight: copying a param with shape torch.Size\(\[6, 5\]\) from checkpoint, "
            r"the shape in current model is torch.Size\(\[7, 5\]\)\.",
            text,
        )


def test_copies_and_fused_views_save_and_load_alike() -> None:
    split, packed = twins()
    x = torch.randn(2, 5)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), fuse(Pair(packed=True), backend="eager")):
        other.load_state_dict(split.state_dict())
        assert list(other.state_dict()) == list(split.state_dict())
        torch.testing.assert_close(other(x), split(x))
    fresh = Pair(packed=True)
    fresh.ff = fuse(fresh.ff, backend="eager")
    fresh.load_state_dict(split.state_dict())
    assert list(fresh.state_dict()) == list(split.state_dict())
    torch.testing.assert_close(fresh(x), split(x))


def test_a_distributed_checkpoint_reads_and_writes_it() -> None:
    split, packed = twins()
    saved = get_model_state_dict(packed)
    assert list(saved) == list(split.state_dict())
    other = Pair(packed=True)
    set_model_state_dict(other, saved)
    x = torch.randn(2, 5)
    torch.testing.assert_close(other(x), split(x))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_checkpoint_is_read_into_it(one_process_mesh: Any, sharded: bool, strict: bool) -> None:
    """torch puts the module's own parameters beside what it is given, and shards only what bears their names."""
    from torch.distributed.fsdp import fully_shard

    split, packed = twins(bias=True)
    target = (
        fully_shard(Pair(packed=True, bias=True), mesh=one_process_mesh) if sharded else Pair(packed=True, bias=True)
    )
    options = StateDictOptions(full_state_dict=True, strict=strict)
    set_model_state_dict(target, split.state_dict(), options=options)
    for name, expected in packed.named_parameters():
        value = target.get_parameter(name)
        assert hasattr(value, "to_local") == sharded
        assert torch.equal(value.to_local() if sharded else value, expected), name


class Lora(nn.Linear):
    """An adapter that is a linear layer itself, with parameters beside its weight."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False)
        self.weight = layer.weight
        self.low = nn.Parameter(torch.randn(rank, layer.in_features))
        self.high = nn.Parameter(torch.randn(layer.out_features, rank))
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.scale * (x @ self.low.T @ self.high.T)


@pytest.mark.parametrize("rank", [1, 2, 14])
def test_what_an_adapter_has_beside_the_weight_is_not_split(rank: int) -> None:
    split, packed = twins()
    packed.ff.gate_up = Lora(packed.ff.gate_up, rank)
    saved = packed.state_dict()
    beside = ["ff.gate_up.low", "ff.gate_up.high", "ff.gate_up.scale"]
    assert list(saved) == [*list(split.state_dict())[:4], *beside, "ff.down.weight"]
    other = Pair(packed=True)
    other.ff.gate_up = Lora(other.ff.gate_up, rank)
    other.load_state_dict(saved)
    x = torch.randn(2, 5)
    torch.testing.assert_close(other(x), packed(x))
    assert other.load_state_dict(split.state_dict(), strict=False).missing_keys == beside


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("value", [3, None])
def test_a_value_that_is_no_tensor(value: object, assign: bool) -> None:
    split, packed = twins()
    given = {**split.state_dict(), "ff.gate.weight": value}
    texts = []
    for pair in (split, packed):
        with pytest.raises(RuntimeError) as error:
            pair.load_state_dict(given, assign=assign)
        texts.append(str(error.value))
    assert texts[0] == texts[1]
    assert f"expected torch.Tensor or Tensor-like object from checkpoint but received {type(value)}" in texts[1]


@pytest.mark.parametrize("part", ["gate", "up"])
def test_one_half_for_a_module_without_memory_is_told_to_be_lost(part: str) -> None:
    split, _ = twins()
    given = split.state_dict()
    del given[f"ff.{part}.weight"]
    with torch.device("meta"):
        packed = Pair(packed=True)
    told = packed.load_state_dict(given, strict=False, assign=True)
    assert told.missing_keys == ["ff.gate.weight", "ff.up.weight"]
    assert packed.ff.gate_up.weight.is_meta
    assert torch.equal(packed.ff.down.weight, split.ff.down.weight)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "ff.gate.weight", "ff.up.weight"\.'):
        packed.load_state_dict(given, assign=True)
