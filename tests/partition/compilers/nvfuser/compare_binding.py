"""Hold the stand-in for nvFuser's binding against the real one.

    python -m tests.partition.compilers.nvfuser.compare_binding [folder]

needs torch and `nvfuser_direct`, with a GPU or without. What the stand-in takes, the real one has to take, and answer
in the same types:

- every operation has overloads with the names and defaults of those in `OVERLOADS`;
- every elementwise operation, of tensors, scalars and numbers of every type, gives the same type and rank. That the
  stand-in refuses more is meant: nvFuser finds out later, when it compiles;
- a tensor's layout is described alike;
- every definition in the folder can be made, and each of its tensors has the type and the rank that it had in the
  stand-in. The tests write them there, where NVFUSER_DEFINITIONS names a folder.
"""

import argparse
import contextlib
import io
import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.partition.compilers.nvfuser.binding import imported_binding
from tests.partition.compilers.nvfuser.fusion_definition import (
    EXECUTED,
    VERSION,
    FusionDefinition,
    StandIn,
    compute_tensor_descriptor,
)
from tests.partition.compilers.nvfuser.signatures import OVERLOADS, Overload
from tests.partition.compilers.nvfuser.values import TensorView

__all__ = ["elementwise_differences", "main", "overload_differences", "written_definition"]

# What is not as in the version that the stand-in was written after, in one that is older.
_CHANGED_SINCE = {
    "nv_grouped_block_quantize",  # there was none
    "sdpfa_bwd",  # logsumexp was called log_sumexp
}
_TYPES = ("Double", "Float", "Half", "BFloat16", "Int", "Int32", "Bool", "ComplexFloat", "ComplexDouble")
# For operations of three operands and more, of which all combinations would be too many.
_FEW_TYPES = ("Double", "Float", "BFloat16", "Int", "Bool")
_NUMBERS = (2, 2.5, True, 1j)
_LAYOUTS = (
    ((2, 3), (3, 1)),
    ((2, 3), (1, 2)),
    ((2, 1, 4), (4, 4, 1)),
    ((2, 3, 4), (0, 4, 1)),
    ((2, 3, 4), (24, 8, 2)),
    ((1, 1), (1, 1)),
    ((5,), (0,)),
    ((), ()),
)

_Operand = tuple[str, str] | int | float | complex


def written_definition(definition: FusionDefinition) -> str:
    """A definition of the stand-in's as JSON: its script, and the type and rank of each of its tensors."""
    fusion = definition.fusion
    assert fusion is not None
    tensors = {
        fusion.names[id(one)]: (one.data_type.name, one.ndim) for one in fusion.tensors if isinstance(one, TensorView)
    }
    return json.dumps({"script": definition.script(), "tensors": tensors})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The real package prints each error before it raises it."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def overload_differences(real: Any) -> Iterator[str]:
    """The operations whose overloads have other parameters in the real package."""
    for name, overloads in OVERLOADS.items():
        if name in _CHANGED_SINCE and _numbers(real.version()) < _numbers(VERSION):
            continue
        ours = {_parameters_of(one) for one in overloads}
        theirs = set(_overloads_said_by(real, name))
        if ours != theirs:
            yield f"{name}: takes {sorted(theirs)}, in the stand-in {sorted(ours)}"
    for name in {one for one in dir(real.ops) if not one.startswith("_")} - OVERLOADS.keys():
        yield f"{name}: not in the stand-in"


def _numbers(version: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", version.partition("+")[0])]


def _parameters_of(overload: Overload) -> str:
    """Names and defaults; the types are left out, since the binding says them in C++."""
    said = []
    for place, one in enumerate(overload.parameters):
        if one.keyword_only and "*" not in said:
            said.append("*")
        text = str(one)
        default = text.rpartition(" = ")[2] if " = " in text else None
        said.append(f"{one.name or f'arg{place}'}" + (f" = {default}" if default is not None else ""))
    return ", ".join(said)


def _overloads_said_by(real: Any, name: str) -> Iterator[str]:
    """The overloads that the error for a call with nonsense lists."""
    said = ""
    try:
        with _quiet(), real.FusionDefinition() as fd:
            getattr(fd.ops, name)(object(), no_such_parameter=object())
    except (TypeError, AttributeError) as error:
        said = str(error)
    for listed in re.findall(r"^\s+\d+\. \((.*)\) -> .*$", said, flags=re.MULTILINE):
        parts = []
        for part in _split(listed):
            parameter, _, rest = part.partition(": ")
            default = rest.rpartition(" = ")[2] if " = " in rest else None
            # An enum's value is written <DataType.Null: 0>.
            parts.append(parameter + (f" = {default.strip('<>').partition(':')[0]}" if default is not None else ""))
        yield ", ".join(parts)


def _split(listed: str) -> list[str]:
    """The parameters of a list, whose types have commas of their own, in brackets."""
    parts, depth = [""], 0
    for character in listed:
        depth += (character in "[(<{") - (character in "])>}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def elementwise_differences(real: Any, stand_in: Any, names: Sequence[str] = tuple(EXECUTED)) -> Iterator[str]:
    """The calls of elementwise operations that the real package refuses, or answers in another type or rank."""
    for name in names:
        overload = OVERLOADS[name][0]
        if all(one.name is None and one.takes.startswith("Val") for one in overload.parameters):
            taken = 0
            for operands in _operands(len(overload.parameters)):
                ours = _answer(stand_in, name, operands, refusals=(RuntimeError, TypeError))
                taken += ours is not None
                if ours is not None and ours != (theirs := _answer(real, name, operands, refusals=(Exception,))):
                    said = " and ".join(" of ".join(one) if isinstance(one, tuple) else repr(one) for one in operands)
                    yield f"{name} of {said}: {theirs or 'is refused'}, in the stand-in {ours}"
            if not taken:
                yield f"{name}: the stand-in takes no operands at all"


def _operands(count: int) -> Iterator[tuple[_Operand, ...]]:
    """Tensors of two dimensions, of none, scalars and numbers, in all types; one tensor at least."""
    types = _TYPES if count < 3 else _FEW_TYPES
    tensors: list[_Operand] = [("2d", one) for one in types]
    rest: list[_Operand] = [("scalar", one) for one in types]
    if count > 1:
        rest += [*(("0d", one) for one in types[:: count - 1]), *(_NUMBERS if count == 2 else _NUMBERS[:2])]
    for operands in itertools.product([*tensors, *rest], repeat=count):
        if any(isinstance(one, tuple) and one[0] != "scalar" for one in operands):
            yield operands


def _answer(
    package: Any, name: str, operands: Sequence[_Operand], *, refusals: tuple[type[Exception], ...]
) -> str | None:
    """The type and rank of what an operation gives, or None if it raises a refusal."""
    with _quiet(), package.FusionDefinition() as fd:
        given = [_operand(package, fd, one) for one in operands]
        try:
            made = getattr(fd.ops, name)(*given)
        except refusals:
            return None
    return _type_of(package, made)


def _operand(package: Any, fd: Any, operand: _Operand) -> Any:
    if not isinstance(operand, tuple):
        return operand
    kind, name = operand
    if kind == "scalar":
        return fd.define_scalar(dtype=getattr(package.DataType, name))
    rank = int(kind[0])
    return fd.define_tensor(shape=[-1] * rank, contiguity=[True] * rank, dtype=getattr(package.DataType, name))


def _type_of(package: Any, made: Any) -> str:
    if not isinstance(made, package.TensorView):
        return "a scalar"
    return f"{str(made.dtype()).rpartition('.')[2]} in {made.ndim} dimensions"


def _descriptor_differences(real: Any) -> Iterator[str]:
    for sizes, strides in _LAYOUTS:
        ours, theirs = (
            list(map(list, one(sizes, strides))) for one in (compute_tensor_descriptor, real.compute_tensor_descriptor)
        )
        if ours != theirs:
            yield f"sizes {sizes} with strides {strides}: {theirs}, in the stand-in {ours}"


def _definition_differences(real: Any, folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob("*.json")):
        written = json.loads(path.read_text())
        made: dict[str, Any] = {"DataType": real.DataType}
        try:
            with _quiet(), real.FusionDefinition() as fd:
                made["fd"] = fd
                exec(written["script"], made)
                types = {
                    name: (str(made[name].dtype()).rpartition(".")[2], made[name].ndim) for name in written["tensors"]
                }
        except Exception as error:
            yield f"{path.name}: is refused: {str(error).strip().splitlines()[0]}"
            continue
        for name, expected in written["tensors"].items():
            if list(types[name]) != expected:
                yield f"{path.name}: {name} is {types[name]}, in the stand-in {expected}"


def main(arguments: Sequence[str]) -> int:
    """Print what differs; return 1 if something does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of definitions that the tests wrote")
    chosen = parser.parse_args(arguments)
    if chosen.folder and not any(chosen.folder.glob("*.json")):
        parser.error(
            f"there are no definitions in {chosen.folder}; run the tests with NVFUSER_DEFINITIONS={chosen.folder}"
        )
    real = imported_binding()
    differences = [
        *overload_differences(real),
        *elementwise_differences(real, StandIn(scalars_pretend=True)),
        *_descriptor_differences(real),
        *(_definition_differences(real, chosen.folder) if chosen.folder else ()),
    ]
    for one in differences:
        print(one, file=sys.stderr)
    definitions = len(list(chosen.folder.glob("*.json"))) if chosen.folder else 0
    compared = f"{len(OVERLOADS)} operations and {definitions} definitions"
    print(f"nvFuser {real.version()} and the stand-in, {compared}: {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
