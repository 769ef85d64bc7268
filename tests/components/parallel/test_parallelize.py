"""parallelize: the numbers of two and four processes are those of one."""

from pathlib import Path

import pytest
from tests.components.parallel.cases import COMPONENTS, SHIPPED, errors_of
from tests.components.parallel.ranks import run

_PAIRS = [(name, sequence) for name in (*SHIPPED, *COMPONENTS) for sequence in (False, True)]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[list[str | None]]:
    return run(2, errors_of, _PAIRS, folder=tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("number", range(len(_PAIRS)), ids=["-".join(map(str, pair)) for pair in _PAIRS])
def test_two_processes_compute_what_one_does(of_two: list[list[str | None]], number: int) -> None:
    for errors in of_two:
        assert errors[number] is None, errors[number]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_processes_compute_what_one_does(tmp_path: Path) -> None:
    # Two key-value heads cannot be shared by four.
    grouped = ("llama_tiny", "qwen3_tiny", "gemma2_tiny", "mistral_tiny", "mixtral_tiny")
    pairs = [pair for pair in _PAIRS if pair[0] not in grouped]
    for errors in run(4, errors_of, pairs, folder=tmp_path, seconds=550):
        assert [error for error in errors if error is not None] == []
