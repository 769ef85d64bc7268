import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import EagerAndRecordGraphs

from benchmarks.lint_kernels.record import recorded_launches
from fuselayers.ops import Shard, dropout, keep_mask, keep_scale
from fuselayers.ops.implementations.launch import kernel, launch
from fuselayers.ops.implementations.triton_language import HAS_TRITON, tl
from fuselayers.ops.philox import keep_by_formula, keep_on_gpu, keep_threshold, keep_tile, philox_4x32
from fuselayers.ops.rows import cdiv
from fuselayers.sources import sources_hash
from tests.ops import truth
from tests.ops.contract import DEVICE, seed_of

# From the reference implementation's known-answer file (Random123, kat_vectors): counter, key, result.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox_4x32(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in words) == expected


@pytest.mark.parametrize(("shape", "number"), [((1, 1), -1), ((3, 7), (1 << 63) - 1), ((2, 8), 0), ((5, 129), -1)])
def test_mask_is_its_definition(shape: tuple[int, int], number: int) -> None:
    seed = torch.tensor(number)
    expected = [truth.kept(int(seed), row, shape[1], round(0.3 * 65536)) for row in range(shape[0])]
    assert keep_mask(seed, shape, p=0.3).tolist() == expected


ROWS = torch.tensor([0, 5, 2**32 - 1, 2**32 + 3, 2**40 + 1])
EVERY_KERNEL = """
import torch
from fuselayers.ops.cpu import has_kernels
from fuselayers.ops.philox import keep_by_formula
from tests.ops.test_philox import ROWS

assert has_kernels()
keep = torch.ops.fuselayers.keep_factors
for index, number in enumerate((0, 7, -1, -2**63, 2**63 - 1, 2**32, 123456789123)):
    seed = torch.tensor(number)
    for groups in range(1, 18):
        # Every threshold with every size would take a minute.
        threshold = (0, 1, 6554, 32767, 32768, 65535, 65536)[(index + groups) % 7]
        for rows in (ROWS, ROWS[::2], None):
            call = seed, rows, 5 if rows is None else len(rows), 3 * index, groups, threshold
            assert torch.equal(keep(*call).bool(), keep_by_formula(*call)), (number, groups, threshold)
print(torch.backends.cpu.get_cpu_capability())
"""


@pytest.mark.slow  # tests/ops/cpu compares AVX2's results, masks included, every day
@pytest.mark.parametrize("capability", ["DEFAULT", "AVX2", "AVX512"])
def test_every_vector_width_has_the_same_mask(capability: str) -> None:
    widths = ["DEFAULT", "AVX2", "AVX512"]
    best = torch.backends.cpu.get_cpu_capability()
    if best not in widths[widths.index(capability) :]:
        pytest.skip(f"needs {capability}, has {best}")
    # torch reads the variable once, so the process must not be a fork of this one.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability.lower()}
    ended = subprocess.run([sys.executable, "-c", EVERY_KERNEL], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{capability}\n"


@pytest.mark.parametrize("columns", [*range(1, 20), 64, 129, 4095, 4097, 12345])
def test_every_width_is_the_formula(columns: int) -> None:
    first = columns % 20
    shard = Shard(start=(2**32 - 2, first), shape=(2**33, columns + 20))
    mask = keep_mask(seed_of(), (3, columns), p=0.3, shard=shard)
    row_R = torch.arange(2**32 - 2, 2**32 + 1)
    groups = (first % 8 + columns + 7) // 8
    expected = keep_by_formula(seed_of(), row_R, 3, first // 8, groups, keep_threshold(0.3))
    assert torch.equal(mask, expected[:, first % 8 : first % 8 + columns])


def test_a_graph_holds_the_hash_of_the_sources() -> None:
    """Inductor's cache on disk identifies the op by its arguments, and its cached code may hold an older kernel."""
    recorder = EagerAndRecordGraphs()
    torch.compile(lambda seed: keep_mask(seed, (2, 8), p=0.5), backend=recorder, fullgraph=True)(seed_of())
    (mask,) = [node for node in recorder.graphs[0].graph.nodes if node.target is torch.ops.fuselayers.keep_factors]
    assert mask.kwargs["sources"] == sources_hash()[:8]


@pytest.mark.parametrize("shape", [(1 << 14, 64), (64, 1 << 14), (1 << 10, 1000)])
def test_a_mask_has_no_period(shape: tuple[int, int]) -> None:
    """The autocorrelation is small at every distance up to half of the elements."""
    signs = keep_mask(seed_of(), shape, p=0.5).flatten().double() * 2 - 1
    spectrum = torch.fft.rfft(signs)
    correlation = torch.fft.irfft(spectrum * spectrum.conj(), n=signs.numel()) / signs.numel()
    assert correlation[0] == pytest.approx(1)
    assert correlation[1 : signs.numel() // 2].abs().max() < 6.5 / signs.numel() ** 0.5


@kernel
def _mask_kernel(  # type: ignore[no-untyped-def]
    seed_ptr, mask_ptr, num_rows, num_columns, threshold, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr
):
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first_column = tl.program_id(1) * BLOCK_COLUMNS
    columns = first_column + tl.arange(0, BLOCK_COLUMNS)
    keep = keep_tile(seed_ptr, None, 0, rows, num_rows, first_column, threshold, BLOCK_ROWS, BLOCK_COLUMNS)
    live = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(mask_ptr + rows[:, None] * num_columns + columns[None, :], keep, mask=live)


@pytest.mark.kernels
@pytest.mark.parametrize("block", [(1, 8), (2, 16), (8, 8), (1, 64), (4, 32), (16, 128)])
def test_kernels_have_the_same_mask_whatever_their_blocks(block: tuple[int, int]) -> None:
    shape = (9, 61)
    for number in (5, -1):
        seed = seed_of() if number == 5 else torch.full_like(seed_of(), number)
        mask = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
        grid = (cdiv(shape[0], block[0]), cdiv(shape[1], block[1]))
        launch(_mask_kernel, grid, (seed, mask, *shape, keep_threshold(0.3)), block)
        assert torch.equal(mask.bool(), keep_mask(seed, shape, p=0.3))


# The groups fill a part of a kernel's tile, one tile and many; rows are counted, read, and read with a stride.
@pytest.mark.kernels
@pytest.mark.parametrize("groups", [1, 16, 33, 300])
@pytest.mark.parametrize("row_R", [None, ROWS, ROWS[::2]], ids=["whole", "rows of a shard", "strided rows"])
def test_the_kernel_of_a_mask_is_the_formula(row_R: torch.Tensor | None, groups: int) -> None:
    num_rows = 5 if row_R is None else len(row_R)
    for number, first_group in ((7, 0), (-1, 2**33 + 5), (2**32, 3)):
        seed, call = torch.tensor(number), (num_rows, first_group, groups, 6554)
        made = keep_on_gpu(seed.to(DEVICE), None if row_R is None else row_R.to(DEVICE), *call)
        assert torch.equal(made.cpu(), keep_by_formula(seed, row_R, *call))
    assert keep_on_gpu(seed_of(), None, 0, 0, 3, 9).shape == (0, 24)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_in_eager_mode_a_gpu_makes_a_mask_in_one_kernel() -> None:
    """The formula would take some two hundred kernels."""
    seed = torch.empty((), dtype=torch.int64, device="meta")
    x = torch.empty(6, 48, dtype=torch.float64, device="meta")
    with recorded_launches() as launches:
        keep_mask(seed, (6, 48), p=0.3)
        dropout(x, 0.3, seed=seed)
        dropout(x.float(), 0.3, seed=seed, shard=Shard(start=(3, 5), shape=(100, 60)))
        torch.vmap(lambda x: dropout(x, 0.3, seed=seed), randomness="same")(x)
    assert [launch.function.__name__ for launch in launches] == ["_keep_kernel"] * 4


def test_scale_makes_the_mean_exact() -> None:
    assert keep_scale(0.25) == 4 / 3
    assert keep_scale(0.1) == 65536 / (65536 - 6554)  # 0.1 is rounded to 6554 / 65536
    assert keep_scale(1 - 1e-9) == 65536
    assert keep_scale(1e-6) == 1


def test_torch_accepts_the_masking_op() -> None:
    keep = torch.ops.fuselayers.keep_factors.default
    torch.library.opcheck(keep, (seed_of(), None, 5, 0, 3, 30000))
    torch.library.opcheck(keep, (seed_of(), torch.tensor([3, 1]), 2, 4, 3, 30000), {"again": True})


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"^dropout probability p must satisfy 0 <= p <= 1, got 1.25$"):
        keep_mask(seed_of(), (2, 2), p=1.25)
    with pytest.raises(ValueError, match=r"^seed must be an int64 tensor of shape \[\], got torch.int64 \[1\]$"):
        keep_mask(seed_of()[None], (2, 2), p=0.5)
    with pytest.raises(TypeError, match=r"^seed must be an int64 tensor of shape \[\], got None; draw one with"):
        keep_mask(None, (2, 2), p=0.5)
    with pytest.raises(ValueError, match=r"^dropout probability p must satisfy 0 <= p <= 1, got 1.5$"):
        keep_scale(1.5)
