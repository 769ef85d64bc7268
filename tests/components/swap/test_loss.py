"""Which forwards keep their own loss."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fuselayers.components.swap import swap, unswap

transformers = pytest.importorskip("transformers")
loss_utils = pytest.importorskip("transformers.loss.loss_utils")
Output = transformers.modeling_outputs.CausalLMOutputWithPast


class Head(nn.Module):
    """The end of a causal model; x is [B, T, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 7)
        self.loss_function: Any = loss_utils.ForCausalLMLoss
        self.vocab_size = 7


class Plain(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        logits = self.lm_head(self.inner(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return Output(loss=loss, logits=logits)


class ByPosition(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        logits = self.lm_head(self.inner(x)).contiguous()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size)
        if not return_dict:
            return (loss, logits)
        return Output(loss=loss, logits=logits)


class TupleInABranch(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        logits = self.lm_head(self.inner(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        if loss is not None:  # noqa: SIM102
            if not return_dict:
                return (loss, logits)
        return Output(loss=loss, logits=logits)


class TupleBeforeTheLoss(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        logits = self.lm_head(self.inner(x))
        extra = None
        if not return_dict:
            extra = logits.mean()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return Output(loss=loss, logits=logits, hidden_states=extra)


class ReturnDictIsBound(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        logits = self.lm_head(self.inner(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        with torch.no_grad():
            return_dict = False
        if not return_dict:
            return (loss, logits)
        return Output(loss=loss, logits=logits)


class Written(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        hidden = self.inner(x)
        logits = self.lm_head(hidden)
        hidden = hidden.detach().mul_(3)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return Output(loss=loss, logits=logits, hidden_states=hidden)


class WrittenByAFunction(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        hidden = self.inner(x)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            written = F.relu_(hidden.detach())
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size) + written.sum()
        return Output(loss=loss, logits=logits)


class WrittenByAStatement(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        hidden = self.inner(x)
        logits = self.lm_head(hidden)
        with torch.no_grad():
            hidden *= 3
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return Output(loss=loss, logits=logits)


class LogitsTwice(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        logits = self.lm_head(self.inner(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return Output(loss=loss, logits=logits, hidden_states=logits)


class LabelsAreBound(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        with torch.no_grad():
            labels = None
        logits = self.lm_head(self.inner(x))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return Output(loss=loss, logits=logits)


class Scaled(Head):
    def forward(self, x: torch.Tensor, labels: Any = None, return_dict: bool = True, **kwargs: Any) -> Any:
        logits = self.lm_head(self.inner(x)) * 0.5
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size)
        return Output(loss=loss, logits=logits)


def batch() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 5, 4), "labels": torch.randint(7, (2, 5))}


@pytest.mark.parametrize("kind", [Plain, ByPosition])
def test_the_loss_is_found(kind: type[Head]) -> None:
    model, given = kind().train(), batch()
    wanted = model(**given)
    wanted_tuple = model(**given, return_dict=False) if kind is ByPosition else None
    (site,) = swap(model, level="layers", batch=given).sites
    assert site.rules == ("causal_lm_loss",)
    got = model(**given)
    assert got.logits is None
    torch.testing.assert_close(got.loss, wanted.loss)
    if wanted_tuple is not None:
        torch.testing.assert_close(model(**given, return_dict=False), wanted_tuple)


@pytest.mark.parametrize(
    "kind",
    [
        *(TupleInABranch, TupleBeforeTheLoss, ReturnDictIsBound, Written),
        *(WrittenByAFunction, WrittenByAStatement, LogitsTwice, LabelsAreBound, Scaled),
    ],
)
def test_another_forward_keeps_its_own(kind: type[Head]) -> None:
    assert swap(kind(), level="layers", verify=False).sites == ()


@pytest.mark.parametrize("kind", [Plain, ByPosition])
def test_a_loss_function_of_ones_own_is_called_as_the_forward_calls_it(kind: type[Head]) -> None:
    model, given = kind().train(), batch()
    seen: list[Any] = []

    def first_logit(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
        seen.append((logits.shape, vocab_size))
        return logits[0, 0, 0]

    def of_outputs(outputs: torch.Tensor, targets: torch.Tensor, size: int) -> torch.Tensor:
        return first_logit(outputs, targets, size)

    swap(model, level="layers", batch=given)
    model.loss_function = first_logit if kind is Plain else of_outputs
    got = model(**given)
    unswap(model)
    assert torch.equal(got.loss, model(**given).loss)
    assert seen == [((2, 5, 7), 7)] * 2
