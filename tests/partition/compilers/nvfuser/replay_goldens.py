"""Make every golden definition again, in the real nvFuser or in whatever is imported in its place.

    python -m tests.partition.compilers.nvfuser.replay_goldens [--write] [name ...]

needs torch and `nvfuser_direct`, and nothing of this library, so that it also runs with a torch that nvFuser has wheels
for and this library is too new for. `make test-nvfuser` installs such a pair and runs it.

What nvFuser prints of each definition is compared with what is stored under its version: its own representation of
it, and which of its schedulers would make one kernel of it; where none would, it makes several. Where nothing is
stored, that is a failure too. --write stores it. With a GPU each is executed, and its results are compared with those
of the stand-in: plain torch, on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.partition.compilers.nvfuser.binding import imported_binding
from tests.partition.compilers.nvfuser.fusion_definition import StandIn

__all__ = ["GOLDENS", "digest_of", "inputs_of", "main", "printed", "regions_of"]

GOLDENS = Path(__file__).with_name("goldens")

# Of results that are about one: the rounding of the dtype, and of sums in another order.
_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def regions_of(path: Path) -> dict[str, tuple[Any, Sequence[Any]]]:
    """The functions of a golden file that write a definition, by name, each with the layouts of its inputs."""
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    return {function.__name__: (function, layouts) for function, layouts in names["REGIONS"]}


def inputs_of(layouts: Sequence[Any], device: str) -> list[Any]:
    """Inputs of these layouts, the same on every device; sizes stay what they are."""
    generator = torch.Generator().manual_seed(0)
    return [one if isinstance(one, int) else _tensor(*one, generator).to(device) for one in layouts]


def _tensor(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    whole = torch.empty_strided(sizes, strides, dtype=dtype)
    # Of what is expanded there is one value.
    base = whole[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
    drawn = torch.randn if dtype.is_floating_point else functools.partial(torch.randint, 0, 2)
    base.copy_(drawn(base.shape, generator=generator))
    return whole


def _defined(package: Any, function: Any) -> Any:
    with package.FusionDefinition() as definition:
        function(definition, package.DataType)
    return definition


def digest_of(path: Path) -> str:
    """Which text of a golden file something was made from."""
    return hashlib.sha1(path.read_bytes()).hexdigest()[:12]


def printed(package: Any, definition: Any, layouts: Sequence[Any]) -> str:
    """What nvFuser says of a definition: its representation of it, and the schedulers that take it whole."""
    shapes = [
        one if isinstance(one, int) else torch.empty_strided(*one[:2], dtype=one[2], device="meta") for one in layouts
    ]
    schedulers = package.schedule.find_compatible_schedulers(definition.fusion, shapes)
    names = ", ".join(one.name for one in schedulers) or "none"
    return f"{definition.fusion.print_math().strip()}\n\none kernel by: {names}\n"


def main(arguments: Sequence[str]) -> int:
    """Replay the goldens; return 1 if one prints otherwise than what is stored, or computes something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="which goldens (default: all)")
    parser.add_argument("--write", action="store_true", help="store what is printed")
    parser.add_argument("--stored", type=Path, default=GOLDENS / "printed", help="where that is")
    chosen = parser.parse_args(arguments)
    package = imported_binding()
    executes = torch.cuda.is_available() or isinstance(package, StandIn)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    stored = chosen.stored / str(package.version())
    failures = 0
    for path in sorted(GOLDENS.glob("*.py")):
        if chosen.names and path.stem not in chosen.names:
            continue
        for name, (function, layouts) in regions_of(path).items():
            said = []
            definition = _defined(package, function)
            text = f"{printed(package, definition, layouts)}of {path.name} {digest_of(path)}\n"
            kept = stored / f"{path.stem}.{name}.txt"
            if chosen.write:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(text)
            elif not kept.exists():
                said.append(f"has nothing stored for version {package.version()}; --write stores what is printed")
            elif kept.read_text() != text:
                said.append(f"is printed otherwise than in {kept}")
            if executes:
                results = definition.execute(inputs_of(layouts, device))
                stand_in = StandIn(scalars_pretend=True)
                expected = _defined(stand_in, function).execute(inputs_of(layouts, "cpu"))
                said += [text for pair in zip(results, expected, strict=True) if (text := _difference(*pair))]
            print(f"{path.stem}.{name}: {'; '.join(said) or 'ok'}", file=sys.stderr)
            failures += bool(said)
    return 1 if failures else 0


def _difference(result: Tensor, expected: Tensor) -> str:
    result = result.cpu()
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return f"gave {result.dtype} {list(result.shape)}, not {expected.dtype} {list(expected.shape)}"
    if not expected.dtype.is_floating_point:
        return "" if torch.equal(result, expected) else "gave other numbers"
    bound = _TOLERANCE[expected.dtype] * max(1.0, expected.double().abs().nan_to_num(0, 0, 0).max().item())
    error = (result.double() - expected.double()).abs().nan_to_num(0, 0, 0).max().item()
    same_nan = torch.equal(result.isfinite(), expected.isfinite())
    return "" if same_nan and error <= bound else f"is off by {error:.3g}, where {bound:.3g} is allowed"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
