"""Functions of torch ops with writes, views, aliases and several outputs."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.example import Example, body, outputs, settings

INPUTS = (
    "rand(B, 16)",
    "rand(16)",
    "rand(16, B).t()",
    "rand(B, 32)[:, ::2]",
    "rand(B + 1, 17)[1:, 1:]",
    "rand(B, 1).expand(B, 16)",
    "rand(B, 16, grad=False)",
    "rand(B, 4, 4)",
    "rand(16, 16)",
    "{a}",
    "{a}.detach()",
    "{a}.view_as({a})",
    "{a}[..., :8]",
)
# Values stay near one and ops continuous, so that rounding errors stay small.
OPS = (
    (
        "{a} + {b}",
        "{a} * {b}",
        "{a}.sin()",
        "{a}.tanh() - {b}",
        "F.gelu({a} + {b})",
        "{a}.sigmoid() * {b}",
        "{a} / (1 + {b} * {b})",
        "(-{a} * {a}).exp()",
        "torch.where({a} > {b}, {a}, {b})",
        "torch.maximum({a}, {b} * 0.5)",
        "{a}.clamp(-1.5, 1.5)",
        "F.relu({a})",
        "F.leaky_relu({a}, 0.1)",
        "torch.atan2({a}, {b}.square() + 1)",
        "({a} * {a} + 1).log()",
        "F.softplus({a})",
    ),
    (
        # Sums.
        "{a} - {a}.mean(-1, keepdim=True)",
        "{a}.sum(0)",
        "{a}.sum(-1).tanh()",
        "{a}.amax(-1, keepdim=True) * {b}",
        "{a}.softmax(-1)",
        "{a}.log_softmax(0) * 0.2",
        "{a}.logsumexp(-1, keepdim=True) - {b}",
        "{a} + ({a}.var(0, correction=0) + 0.1).sqrt()",
        "{a}.norm(dim=-1, keepdim=True).add(1).reciprocal() * {a}",
        "{a}.cumsum(-1) * 0.1",
        "F.layer_norm({a}, ({a}.shape[-1],), eps=0.1)",
        "F.layer_norm({a}, (16,), {b}[..., :].reshape(-1)[:16], eps=0.1)",
    ),
    (
        # Products of matrices.
        "{a} @ {b}.mT * 0.25",
        "{a} @ {b} * 0.25",
        "F.linear({a}, {b}) * 0.25",
        "torch.einsum('...i,...j->...ij', {a}, {b}).tanh()",
    ),
    (
        # Views, copies and layouts.
        "{a}.mT",
        "{a}.t()",
        "{a}[1:]",
        "{a}[..., ::2]",
        "{a}[..., :8]",
        "{a}[0]",
        "{a}.reshape(-1)",
        "{a}.view(-1, 4)",
        "{a}.unflatten(-1, (4, -1))",
        "{a}.unflatten(-1, (4, -1)).transpose(0, -2).contiguous()",
        "{a}.flatten(-2)",
        "{a}.unsqueeze(1)",
        "{a}.unsqueeze(0).expand(3, *{a}.shape)",
        "{a}.expand_as({b})",
        "{a}.contiguous()",
        "{a}.clone()",
        "{a}.detach()",
        "{a}.as_strided((2, 4), (8, 2))",
        "{a}.diagonal()",
        "{a}.chunk(2, -1)[1]",
        "torch.cat(({a}, {b}), -1)",
        "torch.stack(({a}, {b}, {a}))",
        "{a}.flip(-1)",
        "{a}.roll(1, 0)",
        "{a}.gather(-1, {b}.detach().argsort(-1))",
        "{a}[:, torch.tensor((3, 1, 1), device={a}.device)]",
        "{a}.index_add(0, torch.tensor((1, 0)), {b}[:2])",
        "{a}.repeat(2, 1)",
        "{a}.tril()",
        "{a}.masked_fill({b} > 0.5, 0.25)",
        "{a}.sort(-1).values",
        "F.pad({a}, (1, 2))",
        "torch.fft.rfft({a}).conj().imag * 0.2",
        "torch.view_as_complex({a}.unflatten(-1, (-1, 2))).conj().imag",
    ),
    (
        # This library.
        "fl.ops.residual_rms_norm({a}, {b}, weight={c}, eps=0.1)[1]",
        "fl.ops.rms_norm({a}, weight={b}, eps=0.1)",
        "fl.ops.gated_activation({a}, {b})",
        "fl.ops.softmax({a} @ {b}.mT, causal=True, scale=0.25)",
        "fl.ops.linear({a}, {b}) * 0.25",
        "fl.ops.cross_entropy({a}, {b}.detach().argmax(-1))",
    ),
    (
        # Random numbers, also such as nothing reads.
        "F.dropout({a}, 0.3)",
        "torch.rand_like({a}) * {b}",
        "!F.dropout({a}, 0.3)",
        "!torch.rand_like({a})",
        "!fl.ops.dropout({a}, 0.3)",
        "torch.utils.checkpoint.checkpoint(lambda x: (x.sin() * {b}).tanh(), {a}, use_reentrant=False)",
        "fl.ops.dropout({a}, 0.3)",
        "fl.ops.bias_activation_dropout({a}, {b}, activation='gelu', p=0.2)",
        "fl.ops.bias_dropout_residual({a}, {b}, p=0.2)",
        "fl.ops.bias_dropout_residual_layer_norm({a}, {b}, weight={c}, p=0.2, eps=0.1, style='pre')",
    ),
    (
        # Writes.
        "!{a}.mul_(0.5)",
        "!{a}.mul_({b})",
        "!{a}.add_({b})",
        "!{a}.sin_()",
        "!{a}.relu_()",
        "!{a}.copy_({b})",
        "!{a}.zero_()",
        "!{a}[..., 1].mul_(2)",
        "!{a}[0] = {b}[-1]",
        "!{a}[..., 0] += {b}[..., 1]",
        "!{a}.t().sub_({b}.t())",
        "!{a}.masked_fill_({b} > 0, 0.5)",
        "!{a}.detach().add_(1)",
        "!{a}.data.mul_(2)",
        "!{a}.index_put_((torch.tensor((0, 0)),), {b}[:2], accumulate=True)",
    ),
)


@st.composite
def functions(draw: st.DrawFn, most: int = 12) -> Example:
    """A function of up to three tensors and `most` ops."""
    made, names, _, calls = body(draw, INPUTS, OPS, most_inputs=3, most=most)
    parameters = ", ".join(names[: len(made)])
    program = (
        "def make():",
        *(f"    {line}" for line in (f"def function({parameters}):", *(f"    {call}" for call in calls))),
        f"        return {outputs(draw, names)}",
        "",
        "    return function",
        "",
        "",
        "def inputs(rand, B):",
        *(f"    {line}" for line in made),
        f"    return {parameters},",
    )
    text = "\n".join(program)
    options, how = settings(draw, is_random="F.dropout" in text or "rand_like" in text, large=300)
    return Example(text, options, how)
