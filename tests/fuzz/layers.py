"""Stacks of layers from torch.nn and this library, with layouts, writes, tied weights, shared inputs and attention."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.example import Example, body, outputs, settings

# All tensors are [B, T=6, D=16].
INPUTS = (
    "rand(B, 6, 16)",
    "rand(B, 16, 6).transpose(1, 2)",
    "rand(6, B, 16).transpose(0, 1)",
    "rand(B, 6, 32)[..., ::2]",
    "rand(B, 7, 17)[:, 1:, 1:]",
    "rand(B, 1, 16).expand(B, 6, 16)",
    "rand(B, 6, 16, grad=False)",
    "{a}",
    "{a}.detach()",
    "{a}.view_as({a})",
)
_IMAGE = "{a}.transpose(1, 2).unflatten(2, (2, 3))"  # [B, 16, 2, 3]
_TOKENS = ".flatten(2).transpose(1, 2)"
_HEADS = "unflatten(2, (4, 4)).transpose(1, 2)"  # [B, 4, 6, 4]
_FIVE = "unflatten(2, (2, 2, 4)).permute(0, 2, 3, 1, 4)"  # [B, 2, 2, 6, 4]
_JOINED = "permute(0, 3, 1, 2, 4).flatten(2)"
LAYERS = (
    (
        "nn.Linear(16, 16) | {f}({a})",
        "{a} + {b}",
        "F.gelu({a})",
        "nn.LayerNorm(16, eps=0.1) | {f}({a})",
        "nn.RMSNorm(16, eps=0.1) | {f}({a})",
        "{a}.sigmoid() * {b}",
        "{a}.softmax(-1) * 4",
        "nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) | {f}({a})",
        "nn.Linear(32, 16, bias=False) | {f}(torch.cat(({a}, {b}), -1))",
        "nn.Bilinear(16, 16, 16) | {f}({a}, {b})",
        "nn.Linear(6, 6) | {f}({a}.transpose(1, 2)).transpose(1, 2)",
    ),
    (
        # Activations, in place too.
        "nn.ReLU(inplace=True) | {f}({a})",
        "nn.SiLU(inplace=True) | {f}({a})",
        "nn.ELU(inplace=True) | {f}({a})",
        "nn.Hardswish() | {f}({a})",
        "nn.PReLU() | {f}({a})",
        "nn.GLU() | {f}(torch.cat(({a}, {b}), -1))",
        "!{a}.mul_(0.5)",
        "!{a}.add_({b})",
        "!F.relu_({a})",
        "!{a}[:, 0] = {b}[:, 1]",
        "!{a}[..., ::2].mul_({b}[..., 1::2])",
    ),
    (
        # Tied weights and layers that run twice.
        "{last}({a})",
        "nn.Linear(16, 16) | {f}({f}({a}).tanh())",
        "nn.Linear(16, 16) | F.linear({f}({a}), {f}.weight.t())",
        "nn.Linear(16, 16) | torch.utils.checkpoint.checkpoint({f}, {a}, use_reentrant=False).tanh()",
        "nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)) | {f}({a})",
    ),
    (
        # Views and copies.
        "{a}.transpose(1, 2).contiguous().transpose(1, 2)",
        "{a}.flip(1)",
        "{a}.roll(1, 1)",
        "{a}[:, [5, 3, 3, 1, 0, 0]]",
        "{a}.clone()",
        "{a}.detach()",
        "{a}.view({a}.shape)",
        "{a}[:1].expand_as({a})",
        "torch.cat(({a}[:, 3:], {b}[:, :3]), 1)",
        "F.pad({a}, (0, 0, 1, 0))[:, :-1]",
        "{a}.cumsum(1) * 0.3",
    ),
    (
        # Convolutions.
        f"nn.Conv2d(16, 16, 3, padding=1) | {{f}}({_IMAGE}){_TOKENS}",
        f"nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False) | {{f}}({_IMAGE}){_TOKENS}",
        f"nn.ConvTranspose2d(16, 16, 3, padding=1) | {{f}}({_IMAGE}){_TOKENS}",
        f"nn.Conv2d(16, 64, 3, padding=1) | F.pixel_shuffle({{f}}({_IMAGE}), 2)[..., ::2, ::2]{_TOKENS}",
        "nn.Conv1d(16, 16, 3, padding=1) | {f}({a}.mT).mT",
        "nn.Conv1d(16, 16, 5, padding=2, groups=16) | {f}({a}.mT).mT",
    ),
    (
        # Norms of images.
        f"nn.Sequential(nn.Conv2d(16, 16, 1), nn.GroupNorm(4, 16), nn.SiLU()) | {{f}}({_IMAGE}){_TOKENS}",
        # On an input without a gradient, GroupNorm's backward crashes in plain torch 2.13 (docs/reliability.md).
        "nn.Sequential(nn.Conv2d(16, 16, 1), nn.GroupNorm(2, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)) | "
        f"{{f}}({_IMAGE}){_TOKENS}",
        f"nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)) | {{f}}({_IMAGE}){_TOKENS}",
        # Its gradient is wrong in plain torch if the one that arrives is permuted; that of a slice is not.
        f"nn.InstanceNorm2d(16, affine=True) | F.pad({{f}}({_IMAGE}), (0, 1))[..., :-1]{_TOKENS}",
        "nn.GroupNorm(2, 6) | {f}({a})",
        "nn.BatchNorm1d(6) | {f}({a})",
    ),
    (
        # Pools, with windows that do not divide the sizes.
        "F.interpolate(F.avg_pool1d({a}.mT, 4, ceil_mode=True), 6).mT",
        f"nn.Upsample(size=(2, 3), mode='bilinear') | {{f}}(F.avg_pool2d({_IMAGE}, 2, ceil_mode=True)){_TOKENS}",
        f"F.avg_pool2d({_IMAGE}, 3, 1, 1, count_include_pad=False){_TOKENS}",
        "F.interpolate(F.avg_pool3d({a}[:, None, None], (1, 4, 3), ceil_mode=True), (1, 6, 16))[:, 0, 0]",
        f"nn.Upsample(size=(2, 3)) | {{f}}(F.max_pool2d({_IMAGE}, 2)){_TOKENS}",
        "F.interpolate(F.max_pool1d({a}.mT, 4, padding=1, ceil_mode=True), 6, mode='linear').mT",
        "F.interpolate(F.adaptive_avg_pool2d({a}[:, None], (4, 7)), (6, 16))[:, 0]",
        "F.interpolate(F.adaptive_max_pool1d({a}.mT, 4), 6).mT",
    ),
    (
        # Recurrent cells.
        "nn.GRUCell(16, 16) | {f}({a}.flatten(0, 1), {b}.flatten(0, 1)).view({a}.shape)",
        "nn.LSTMCell(16, 16) | {f}({a}.flatten(0, 1))[1].view({a}.shape)",
        "nn.GRU(16, 16, batch_first=True) | {f}({a})[0]",
        "nn.LSTM(16, 8, batch_first=True, bidirectional=True) | {f}({a})[0]",
    ),
    (
        # Attention.
        f"F.scaled_dot_product_attention({{a}}.{_HEADS}, {{b}}.{_HEADS}, {{c}}.{_HEADS}).transpose(1, 2).flatten(2)",
        f"F.scaled_dot_product_attention({{a}}.{_HEADS}, {{b}}.{_HEADS}, {{c}}.{_HEADS}, is_causal=True)"
        ".transpose(1, 2).flatten(2)",
        f"(({{a}}.{_HEADS} @ {{b}}.{_HEADS}.mT / 2).softmax(-1) @ {{c}}.{_HEADS}).transpose(1, 2).flatten(2)",
        f"F.scaled_dot_product_attention({{a}}.{_FIVE}, {{b}}.{_FIVE}, {{c}}.{_FIVE}).{_JOINED}",
        f"(({{a}}.{_FIVE} @ {{b}}.{_FIVE}.mT / 2).softmax(-1) @ {{c}}.{_FIVE}).{_JOINED}",
        "nn.MultiheadAttention(16, 2, batch_first=True) | {f}({a}, {b}, {b}, need_weights=False)[0]",
        "nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) | {f}({a})",
    ),
    (
        # This library.
        "fl.components.MultiHeadAttention(16, num_heads=2) | {f}({a})",
        "fl.components.LocalAttention(16, num_heads=2, window=2) | {f}({a})",
        "fl.components.LinearAttention(16, num_heads=2) | {f}({a})",
        "fl.components.GatedMLP(16) | {f}({a})",
        "fl.components.ConvMLP(16) | {f}({a})",
        "fl.components.MixtureOfExperts(16, num_experts=3) | {f}({a})",
        "fl.components.LayerNorm(16, eps=0.1) | {f}({a})",
        "fl.components.RMSNorm(16, eps=0.1) | {f}.add({a}, {b})[1]",
    ),
    (
        # Random numbers, also such as nothing reads.
        "nn.Dropout(0.3) | {f}({a})",
        "nn.Dropout(0.3) | !{f}({a})",
        "fl.components.FusedBiasActivationDropout(0.2, 16) | {f}({a})",
        "fl.components.FusedBiasDropoutResidualLayerNorm(0.2, 16) | {f}({a}, {b})",
        "fl.components.FusedMLP(16, dropout=0.2) | {f}({a})",
        "fl.components.MultiHeadAttention(16, num_heads=4, num_kv_heads=2, causal=True, dropout=0.2) | {f}({a})",
    ),
)


@st.composite
def layers(draw: st.DrawFn, most: int = 12) -> Example:
    """A module of up to two inputs and `most` layers."""
    made, names, own, calls = body(draw, INPUTS, LAYERS, most_inputs=2, most=most)
    parameters = ", ".join(names[: len(made)])
    mode = draw(st.sampled_from(("", "", ".eval()")))
    program = (
        "class Model(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        *(f"        {line}" for line in own),
        "",
        f"    def forward(self, {parameters}):",
        *(f"        {call}" for call in calls),
        f"        return {outputs(draw, names)}",
        "",
        "",
        "def make():",
        f"    return Model(){mode}",
        "",
        "",
        "def inputs(rand, B):",
        *(f"    {line}" for line in made),
        f"    return {parameters},",
    )
    text = "\n".join(program)
    options, how = settings(draw, is_random="nn.Dropout" in text, large=48)
    return Example(text, options, how)
