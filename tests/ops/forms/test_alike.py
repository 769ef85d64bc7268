import pytest
import torch
from torch import nn

from fuselayers.ops.forms import alike
from fuselayers.ops.forms.alike import MOST_ALIKE, is_plain, like_these, put_first


class Named(torch.Tensor):
    pass


def test_numbers_in_memory_are_plain() -> None:
    x = torch.ones(4, 4)
    for one in (x, nn.Parameter(x), x.mT, x[:, ::2], x.long(), torch.empty(0)):
        assert is_plain(one)
    negative = torch.complex(x, x).conj().imag
    assert negative.is_neg()
    for one in (x.to_sparse_csr(), x.to_sparse(), x.to("meta"), x.as_subclass(Named), negative):
        assert not is_plain(one)
    seen: list[bool] = []
    torch.func.vmap(lambda row: (seen.append(is_plain(row)), row)[1])(x)
    assert seen == [False]


def test_what_is_like_these() -> None:
    x, y = torch.ones(2, 8), torch.ones(8)
    like = like_these([x, y])
    assert like is not None
    assert like(x + 1, y + 1)
    for others in ((x, y.double()), (x[:1], y), (x.mT.contiguous().mT, y), (x, nn.Parameter(y)), (x, None)):
        assert not like(*others)
    assert not like(x, x)


@pytest.mark.parametrize("second", ["the first", "no strides"])
def test_nothing_is_like_what_cannot_be_told_apart(second: str) -> None:
    x = torch.eye(4)
    assert like_these([x, x if second == "the first" else x.to_sparse_csr()]) is None


def test_the_newest_is_first_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alike, "_MOST_KEYS", 2)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    for number in range(MOST_ALIKE + 1):
        put_first(known, (1,), number)
    assert known == {(1,): tuple(range(MOST_ALIKE, 0, -1))}
    put_first(known, (2,), 0)
    put_first(known, (1,), 0)  # no new key
    assert list(known) == [(1,), (2,)]
    put_first(known, (3,), 0)
    assert list(known) == [(2,), (3,)]
