"""What differs between the stand-in and a binding is found and said. `make test-nvfuser` has the real one."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.partition.compilers.nvfuser import compare_binding
from tests.partition.compilers.nvfuser.compare_binding import (
    elementwise_differences,
    main,
    overload_differences,
    written_definition,
)
from tests.partition.compilers.nvfuser.definitions import defined, floats
from tests.partition.compilers.nvfuser.fusion_definition import StandIn
from tests.partition.compilers.nvfuser.signatures import OVERLOADS

# As pybind11 says it, types and all.
_SAID_OF_SUM = """sum(): incompatible function arguments. The following argument types are supported:
    1. (arg: nvfuser_direct._C_DIRECT.TensorView, dtype: nvfuser_direct._C_DIRECT.DataType = <DataType.Null: 0>) -> nvfuser_direct._C_DIRECT.TensorView
    2. (arg: nvfuser_direct._C_DIRECT.TensorView, dim: typing.SupportsInt, keepdim: bool = False, dtype: nvfuser_direct._C_DIRECT.DataType = <DataType.Null: 0>) -> nvfuser_direct._C_DIRECT.TensorView
    3. (arg: nvfuser_direct._C_DIRECT.TensorView, dims: collections.abc.Sequence[typing.SupportsInt], keepdim: bool = False, dtype: nvfuser_direct._C_DIRECT.DataType = <DataType.Null: 0>) -> nvfuser_direct._C_DIRECT.TensorView

Invoked with: <object object at 0x7f0000000000>
"""  # noqa: E501
_SAID_OF_RANDOM = """uniform(): incompatible function arguments. The following argument types are supported:
    1. (minval: nvfuser::Val | dict[str, int], shape: list, *, rng_seed: nvfuser::Val | None = None) -> nvfuser::TensorView
"""  # noqa: E501


def saying(monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> StandIn:
    """A package with one operation, which says `said` whatever it is called with."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise TypeError(said)

    package = StandIn()
    package.ops = types.SimpleNamespace(**{name: refuse})
    monkeypatch.setattr(compare_binding, "OVERLOADS", {name: OVERLOADS[name]})
    return package


def test_overloads_are_read_from_what_the_binding_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [*overload_differences(saying(monkeypatch, "sum", _SAID_OF_SUM))]


def test_another_overload_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    (said,) = overload_differences(saying(monkeypatch, "uniform", _SAID_OF_RANDOM))
    assert said.startswith(
        "uniform: takes ['minval, shape, *, rng_seed = None'], in the stand-in ['minval, maxval, shape"
    )


@pytest.mark.parametrize(("version", "differs"), [("0.2.35+git2b0490a", False), ("0.2.36", True), ("0.3.0", True)])
def test_what_came_later_may_be_missing(version: str, differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package = saying(monkeypatch, "nv_grouped_block_quantize", "no overloads")
    package.__version__ = version
    assert bool([*overload_differences(package)]) is differs


def test_an_operation_that_is_new_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    package = saying(monkeypatch, "sum", _SAID_OF_SUM)
    package.ops.brand_new = None
    assert [*overload_differences(package)] == ["brand_new: not in the stand-in"]


def test_the_stand_in_is_as_itself() -> None:
    assert not [*elementwise_differences(StandIn(scalars_pretend=True), StandIn(scalars_pretend=True), ["add", "exp"])]


def crooked(change: Callable[[str, Any], Any]) -> StandIn:
    """A package whose operations answer what `change` makes of the answer."""
    package = StandIn(scalars_pretend=True)
    straight = package.ops

    class Ops:
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: change(name, getattr(straight, name)(*args, **kwargs))

    package.ops = Ops()
    package.FusionDefinition = type(
        "FusionDefinition",
        (package.FusionDefinition,),
        {"ops": property(lambda self: package.ops, lambda self, _: None)},
    )
    return package


def test_another_type_is_said() -> None:
    package = crooked(lambda _, made: made.fusion.called("cast", (made, package.DataType.Double), {}))
    differences = [*elementwise_differences(package, StandIn(scalars_pretend=True), ["exp"])]
    assert "exp of 2d of Half: Double in 2 dimensions, in the stand-in Float in 2 dimensions" in differences


def test_what_is_refused_is_said() -> None:
    def refuse(name: str, made: Any) -> Any:
        raise RuntimeError("no")

    differences = [*elementwise_differences(crooked(refuse), StandIn(scalars_pretend=True), ["exp"])]
    assert "exp of 2d of Float: is refused, in the stand-in Float in 2 dimensions" in differences


def test_definitions_are_made_again(
    nvfuser_stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_binding, "OVERLOADS", {})
    monkeypatch.setattr(compare_binding, "elementwise_differences", lambda *packages: ())
    written = written_definition(defined(nvfuser_stand_in, lambda fd, x: fd.ops.exp(x), floats(2, 3)))
    (tmp_path / "right.json").write_text(written)
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nvFuser 0.2.36 and the stand-in, 0 operations and 1 definitions: 0 differences\n"
    changed = json.loads(written)
    changed["tensors"]["t1"] = ["Half", 2]
    (tmp_path / "other.json").write_text(json.dumps(changed))
    (tmp_path / "refused.json").write_text(json.dumps({"script": "fd.ops.no_such_thing()", "tensors": {}}))
    assert main([str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "other.json: t1 is ('Float', 2), in the stand-in ['Half', 2]",
        "refused.json: is refused: module 'nvfuser_direct.ops' has no attribute 'no_such_thing'",
    ]


def test_a_binding_that_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvfuser_direct", None)
    with pytest.raises(ModuleNotFoundError, match="nvfuser_direct"):
        compare_binding.imported_binding()


def test_a_stand_in_that_takes_nothing_is_said() -> None:
    def refuse(name: str, made: Any) -> Any:
        raise RuntimeError("no")

    differences = [*elementwise_differences(StandIn(scalars_pretend=True), crooked(refuse), ["exp"])]
    assert differences == ["exp: the stand-in takes no operands at all"]


def test_an_accident_of_the_stand_in_is_no_refusal() -> None:
    def stumble(name: str, made: Any) -> Any:
        raise AttributeError("an accident")

    with pytest.raises(AttributeError, match="an accident"):
        [*elementwise_differences(StandIn(scalars_pretend=True), crooked(stumble), ["exp"])]


def test_a_folder_without_definitions_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    said = f"there are no definitions in {tmp_path}; run the tests with NVFUSER_DEFINITIONS={tmp_path}"
    assert said in capsys.readouterr().err
