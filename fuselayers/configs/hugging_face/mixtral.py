"""Mixtral: Llama with a mixture of experts."""

from typing import Any, Final

from .family import Family, Key
from .fields import Fields
from .llama import LAYER, REPEATED, SECOND_NORM, llama_like

FAMILY: Final = Family(
    keys=(
        *LAYER,
        *SECOND_NORM,
        Key("model.layers.{}.mlp.gate.weight", "blocks.{}.feedforward.router.weight"),
        Key("model.layers.{}.mlp.experts.{}.gate_proj", "blocks.{}.feedforward.experts.{}.gate.weight"),
        Key("model.layers.{}.mlp.experts.{}.up_proj", "blocks.{}.feedforward.experts.{}.up.weight"),
        Key("model.layers.{}.mlp.experts.{}.down_proj", "blocks.{}.feedforward.experts.{}.down.weight"),
    ),
    repeated=REPEATED,
    older=(
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"(\.experts\.\d+)\.w1\.weight$", r"\1.gate_proj"),
        (r"(\.experts\.\d+)\.w3\.weight$", r"\1.up_proj"),
        (r"(\.experts\.\d+)\.w2\.weight$", r"\1.down_proj"),
    ),
)


def read(fields: Fields) -> dict[str, Any]:
    fields.require("router_jitter_noise", 0.0)
    config = llama_like(fields, base=1000000.0, eps=1e-5)
    config["attention"]["window"] = fields.optional("sliding_window")
    config["feedforward"] = {
        "expert": config["feedforward"],
        "num_experts": fields.get("num_local_experts"),
        "top_k": fields.get("num_experts_per_tok", 2),
        # Theirs scales the mean over the layers. Here the losses of the layers are added.
        "balance_coefficient": fields.checked("router_aux_loss_coef", float, default=0.001, minimum=0)
        / config["model"]["num_layers"],
    }
    return config
