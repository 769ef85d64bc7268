import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fuselayers.components import GatedMLP
from tests.components.compare import randomise, run

SHARDED_WEIGHTS_STAY_EMPTY = pytest.mark.skipif(
    torch.__version__ < "2.13",
    reason="torch 2.12 reads no full state dict into a sharded model",
)


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


@pytest.mark.parametrize(
    ("activation", "backend", "bias"),
    [
        ("silu", "auto", False),
        ("silu", "auto", True),
        ("gelu", "auto", True),
        (None, "auto", False),
        ("relu", "eager", True),
    ],
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
        state = torch.load(file)
        keys = list(state)
        target.load_state_dict(state, assign=assign)
        assert list(state) == keys
        x = torch.randn(2, 5)
        torch.testing.assert_close(target(x), source(x))


def test_what_is_missing_is_named_as_in_the_split_form_and_stays() -> None:
    split, packed = twins()
    state = split.state_dict()
    del state["ff.up.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "ff.up.weight"\.'):
        packed.load_state_dict(state)
    state["ff.gate.weight"] = torch.full((7, 5), 2.0)
    before = packed.ff.gate_up.weight.detach().clone()
    assert packed.load_state_dict(state, strict=False) == Pair().load_state_dict(state, strict=False)
    assert packed.ff.gate_up.weight[:7].eq(2.0).all()
    assert torch.equal(packed.ff.gate_up.weight[7:], before[7:])
    nothing = packed.load_state_dict({}, strict=False)
    assert {"ff.gate.weight", "ff.up.weight", "ff.down.weight"} <= set(nothing.missing_keys)
    assert "ff.gate_up.weight" not in nothing.missing_keys


# torch looks for missing names only if strict, and walks the names of shards in another function.
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=SHARDED_WEIGHTS_STAY_EMPTY)])
def test_a_full_checkpoint_is_read_into_it(one_process_mesh: Any, sharded: bool, strict: bool) -> None:
    """torch compares the state with the module's own parameters, and shards only the entries that have their names."""
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
