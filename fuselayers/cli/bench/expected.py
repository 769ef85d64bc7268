"""The times that the model of `fuselayers lint-kernels` expects of the library's kernels, beside those measured."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from .ahead import run_ahead
from .cases import Settings, op_case
from .measure import OURS
from .suite import Suite, Variant, settings_of


def arch_of(device: torch.device) -> str:
    """The architecture of a GPU, as `lint-kernels` names it."""
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def add_expected(suite: Suite, chosen: Sequence[Variant], *, arch: str, workers: int, seconds: float) -> None:
    """Fill `expected` of the rows of the library's kernels; nothing for a GPU that the model does not know.

    The kernels are compiled once more, in `workers` processes and for `seconds` at most.
    """
    by_title = {variant.title: variant for variant in chosen}
    rows = [row for row in suite.rows if row.candidate == OURS and row.floor]
    calls = [
        partial(
            expected_seconds,
            by_title[row.title].op,
            settings_of(by_title[row.title], row.shape, getattr(torch, row.dtype), torch.device("meta")),
            arch,
        )
        for row in rows
    ]
    for row, found in zip(rows, run_ahead(calls, workers=workers, seconds=seconds), strict=True):
        row.expected.update(found or {})


def expected_seconds(op: str, settings: Settings, arch: str) -> dict[str, float]:
    """Return the expected seconds of "forward" and of "forward_backward" of a call of an op."""
    # They import the cases of `bench`.
    from ..lint_kernels.cases import Case, call_of
    from ..lint_kernels.figures import expected_of
    from ..lint_kernels.roofline import GPUS

    if arch not in GPUS:
        return {}
    call = call_of(op_case(op, replace(settings, device=torch.device("meta"))))
    forward, both = expected_of(Case(op, "", settings.shape[-1], settings.dtype, lambda _: call()), arch).seconds
    return {"forward": forward, "forward_backward": both}
