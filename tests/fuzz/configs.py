"""Configs: random components of the registry that fit together."""

from __future__ import annotations

from hypothesis import assume
from hypothesis import strategies as st

from fuselayers.components import names
from fuselayers.configs import build
from tests.fuzz.example import Example, settings

# For each group the overrides to choose from, besides those that choose a component. Options of another component than
# the chosen one are refused, and left out.
_OPTIONS = {
    "attention": (
        "attention.num_heads=2",
        "attention.num_heads=4",
        "attention.num_kv_heads=1",
        "attention.bias=false",
        "attention.dropout=0.2",
        "attention.window=3",
        "attention.qk_norm=rms_norm",
        "attention.soft_cap=5.0",
        "attention.sinks=true",
        "attention.projections=separate",
        "attention.projections=shared",
    ),
    "feedforward": (
        *(f"feedforward.activation={name}" for name in names("activation")),
        "feedforward.bias=false",
        "feedforward.dropout=0.2",
        "feedforward.packed=true",
        "feedforward.top_k=1",
        "feedforward.shared_experts=1",
        "feedforward.capacity_factor=1.0",
        "feedforward.gating=expert_choice",
    ),
    "norm": ("norm.bias=false", "norm.unit_offset=true"),
    "residual": ("residual.layer_scale=0.5", "residual.stochastic_depth=0.3", "residual.separate_norms=true"),
    "position": ("position.interleaved=true", "position.fraction=0.5"),
    "model": ("model.tie_embeddings=false", "model.loss=fused", "model.logit_soft_cap=3.0", "model.head_bias=true"),
}
# Small, with weights that make every layer matter.
_SMALL = ("model.hidden_dim=16", "model.context_length=8", "model.vocab_size=11")


def _builds(source: str, overrides: list[str]) -> bool:
    try:
        build(source, overrides)
    except ValueError:
        return False
    return True


@st.composite
def configs(draw: st.DrawFn) -> Example:
    """A small decoder or encoder with random components and options."""
    source = draw(st.sampled_from(("gpt2_tiny", "bert_tiny")))
    overrides = [*_SMALL, f"model.num_layers={draw(st.integers(1, 2))}", "model.init_std=0.2", "fusion=off"]
    overrides += [f"model.dropout={draw(st.sampled_from((0.0, 0.1)))}"]
    overrides += [f"{group}={draw(st.sampled_from(names(group)))}" for group in _OPTIONS if group != "model"]
    assume(_builds(source, overrides))
    for group in _OPTIONS:
        for option in draw(st.lists(st.sampled_from(_OPTIONS[group]), max_size=2, unique=True)):
            if _builds(source, [*overrides, option]):
                overrides.append(option)
    mode = draw(st.sampled_from(("", "", ".eval()")))
    arguments = draw(st.sampled_from(("tokens, tokens.flip(1)", "tokens,")))
    lines = (
        "def make():",
        f'    return fl.build("{source}", {overrides}){mode}'.replace("'", '"'),
        "",
        "",
        "def inputs(rand, B):",
        "    tokens = torch.randint(11, (B, 8))",
        f"    return {arguments}",
    )
    # Stochastic depth and the dropout of attention in torch draw by torch's generator.
    options, how = settings(draw, is_random=True, large=40)
    if "attention=favor" in overrides:
        options["dynamic"] = False  # Dynamo takes minutes for its symbolic sizes
    return Example("\n".join(lines), options, how)
