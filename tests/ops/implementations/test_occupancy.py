import pytest

from fuselayers.ops.implementations.occupancy import AMD, NVIDIA, Processor


@pytest.mark.parametrize(
    ("processor", "registers", "shared", "threads", "resident"),
    [
        (NVIDIA, 128, 0, 256, 2),
        (NVIDIA, 129, 0, 256, 1),  # 136 are allocated
        (NVIDIA, 40, 0, 256, 6),
        (NVIDIA, 16, 0, 128, 16),  # no more threads
        (NVIDIA, 16, 0, 32, 32),  # no more programs
        (NVIDIA, 16, 75 << 10, 128, 3),
        (NVIDIA, 16, 76 << 10, 128, 2),  # with the reserved kilobyte a third is too much
        (AMD, 128, 0, 512, 2),
        (AMD, 16, 32 << 10, 256, 2),
        (NVIDIA, 255, 0, 1024, 1),  # even if the count says that it cannot run
    ],
)
def test_the_scarcest_resource_decides(
    processor: Processor, registers: int, shared: int, threads: int, resident: int
) -> None:
    assert processor.resident(registers=registers, shared=shared, threads=threads) == resident
