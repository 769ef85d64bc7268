import pytest
import torch
from torch import nn

from fuselayers.components.model.tokens import check_like_tokens, check_tokens, look_up, token_loss


def test_the_loss_is_the_mean_of_the_positions_that_count() -> None:
    logits = torch.randn(2, 3, 5, dtype=torch.float64)
    targets = torch.tensor([[0, -100, 4], [2, 1, -100]])
    expected = [
        -logits[b, t].log_softmax(-1)[targets[b, t]] for b in range(2) for t in range(3) if targets[b, t] != -100
    ]
    loss = token_loss(logits, targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.stack(expected).mean().float())


def test_bfloat16_logits_are_compared_in_float32() -> None:
    logits = torch.randn(2, 3, 50).bfloat16()
    targets = torch.randint(50, (2, 3))
    torch.testing.assert_close(token_loss(logits, targets), token_loss(logits.float(), targets), rtol=0, atol=0)


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"^tokens must be a tensor \[B, T\], got list; use torch.tensor\(tokens\)$"):
        check_tokens([[1]])
    with pytest.raises(TypeError, match=r"^tokens must be int64 or int32, got torch.float32; convert with tokens.long"):
        check_tokens(torch.ones(1, 1))
    with pytest.raises(
        ValueError, match=r"^tokens must be \[B, T\], got \[3\]; add the batch dimension with tokens\[No"
    ):
        check_tokens(torch.ones(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^tokens must hold at least one token per row, got \[2, 0\]$"):
        check_tokens(torch.ones(2, 0, dtype=torch.int64))
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(
        ValueError, match=r"^targets must be torch.int64 \[1, 2\] like tokens, got torch.int64 \[1, 3\]$"
    ):
        check_like_tokens("targets", torch.zeros(1, 3, dtype=torch.int64), tokens, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^tokens must be in 0..3, got -1..7$"):
        look_up(nn.Embedding(4, 2), torch.tensor([[7, -1]]))
    with pytest.raises(TypeError, match=r"^targets must be a tensor like tokens, got list; use torch.tensor"):
        check_like_tokens("targets", [[1]], tokens, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"^targets must be in 0..3 or -100, got 1..4$"):
        token_loss(torch.zeros(1, 2, 4), torch.tensor([[1, 4]]))
