import pytest
from torch import Tensor, nn

from fuselayers.components import register, registry
from fuselayers.components.attention.inputs import ABILITIES, check_able, is_able, takes


def some(x: Tensor, *, rotate: object = None, cache: object = None, colour: object = None) -> Tensor:
    return x


def every(x: Tensor, **inputs: object) -> Tensor:
    return x


def test_the_signature_says_what_is_taken() -> None:
    assert takes(some) == {"rotate", "cache"}
    assert takes(every) == set(ABILITIES)


class Fixed(nn.Module):
    def __init__(self, hidden_dim: int) -> None:
        super().__init__()

    forward = staticmethod(some)


def test_an_attention_that_cannot_is_refused_and_those_that_can_are_named() -> None:
    register("attention", "fixed")(Fixed)
    try:
        assert is_able("fixed", "rotate")
        assert not is_able("fixed", "causal")
        check_able("fixed", "cache", wanted_by="generation")
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the text is compared below)
            check_able("fixed", "key_padding_mask", wanted_by="a padded batch")
    finally:
        del registry._OWNERS["attention"]["fixed"]
    said = str(caught.value)
    assert said.startswith("attention 'fixed' cannot leave padding out, which a padded batch needs; those that can: ")
    assert "multi_head" in said
    assert "fixed" not in said.partition("those that can")[2]
