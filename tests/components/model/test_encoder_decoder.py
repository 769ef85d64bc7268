import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselayers.components import EncoderDecoder
from tests.components.compare import randomise
from tests.components.model.small import made, tokens


def written_out(model: EncoderDecoder, source: Tensor, inputs: Tensor, real: Tensor | None = None) -> Tensor:
    """Calls the model's own blocks."""
    memory = model.token.weight[source] + model.encoder.position.table.weight[: source.shape[1]]
    for block in model.encoder.blocks:
        memory = block(memory, key_padding_mask=real)
    memory = F.layer_norm(memory, (8,), model.encoder.norm.weight, model.encoder.norm.bias)
    y = model.token.weight[inputs] + model.decoder.position.table.weight[: inputs.shape[1]]
    for block in model.decoder.blocks:
        y = block(y, memory=memory, memory_padding_mask=real)
    y = F.layer_norm(y, (8,), model.decoder.norm.weight, model.decoder.norm.bias)
    head = model.token.weight if model.head is None else model.head.weight
    return y @ head.T * model.logit_scale


@pytest.mark.parametrize(("tied", "padded"), [(True, False), (False, True)])
def test_values_and_gradients(tied: bool, padded: bool) -> None:
    options = {"num_decoder_layers": 3, "tie_embeddings": tied, "logit_scale": 8**-0.5, "start_token": 5}
    model = randomise(made(EncoderDecoder, **options)).double()
    source, targets = tokens(3, 7), tokens(3, 5)
    targets[1, 2:] = -100
    mask = torch.arange(7) < torch.tensor([[7], [3], [1]]) if padded else None
    inputs = torch.cat((torch.full((3, 1), 5), targets[:, :-1]), 1)
    inputs[inputs == -100] = 5
    logits = written_out(model, source, inputs, mask)
    torch.testing.assert_close(model(source, inputs_BT=inputs, key_padding_mask=mask), logits)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    loss = model(source, targets, key_padding_mask=mask)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    got = torch.autograd.grad(loss, list(model.parameters()))
    # The loss is taken in float32.
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block", ["transformer", "reversible"])
def test_generate_takes_the_likeliest_token_of_the_last_context(block: str) -> None:
    model = made(EncoderDecoder, block=block, start_token=3)
    source = tokens(2, 5)
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    expected = torch.full((2, 1), 3)
    with torch.no_grad():
        for _ in range(9):  # two more than the context holds
            likeliest = model(source, inputs_BT=expected[:, -7:], key_padding_mask=mask)[:, -1].argmax(-1)
            expected = torch.cat((expected, likeliest[:, None]), dim=1)
    got = model.generate(source, 9, temperature=0, key_padding_mask=mask)
    assert torch.equal(got, expected[:, 1:])
    assert model.generate(source.int(), 2).dtype == torch.int32
    assert model.generate(source, 0).shape == (2, 0)


def test_generate_is_reproducible_and_leaves_every_mode_as_it_was() -> None:
    model = made(EncoderDecoder, dropout=0.5)
    model.decoder.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    source = tokens(2, 5)
    calls: list[int] = []
    model.encoder.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    first, again = (model.generate(source, 6, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(first, again)
    assert len(calls) == 2  # the encoder runs once per call
    assert [module.training for module in model.modules()] == modes
