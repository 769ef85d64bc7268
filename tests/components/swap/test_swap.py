import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.components.swap import Rule, Site, swap, unswap
from fuselayers.components.swap.slots import is_linear
from fuselayers.partition import saved_bytes
from tests.components.swap.models import FAMILIES, VARIANTS, batch_for, loss_of

SLOW = (
    *("mbart", "gptj", "cohere", "stablelm", "starcoder2", "deberta-v2", "electra", "dinov2"),
    *("falcon, one after the other", "falcon, two norms", "gpt_neox, one after the other"),
)
"""Families with a quick one that is much like them."""


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss_of(model, batch).backward()
    return [one.grad for one in model.parameters()]


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow if one in SLOW else ()) for one in (*FAMILIES, *VARIANTS)],
)
def test_the_families(name: str) -> None:
    make, rules = (FAMILIES | VARIANTS)[name]
    model, batch = make().eval(), batch_for(name)
    keys, parameters = list(model.state_dict()), [id(one) for one in model.parameters()]
    loss, expected = loss_of(model, batch), gradients(model, batch)
    classes = [type(one) for one in model.modules()]
    report = swap(model, level="layers", batch=batch)
    assert {rule for site in report.sites for rule in site.rules} == rules
    assert report.skipped == ()
    # Some dropouts are never called, and attention that drops nothing is torch's.
    compared = [site for site in report.sites if site.kind != "Dropout" and site.rules != ("attention_dropout",)]
    assert all(site.error is not None for site in compared)
    assert list(model.state_dict()) == keys
    assert [id(one) for one in model.parameters()] == parameters
    assert [type(one).__name__ for one in model.modules()] == [one.__name__ for one in classes]
    assert all(isinstance(one, kind) for one, kind in zip(model.modules(), classes, strict=True))
    torch.testing.assert_close(loss_of(model, batch), loss, atol=1e-6, rtol=1e-5)
    for got, wanted in zip(gradients(model, batch), expected, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-4)
    assert unswap(model) == len(report.sites)
    assert [type(one) for one in model.modules()] == classes


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_copies_and_pickles_are_swapped_too(name: str) -> None:
    model, batch = FAMILIES[name][0]().eval(), batch_for(name)
    swap(model, level="layers", verify=False)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert [type(one) for one in other.modules()] == [type(one) for one in model.modules()]
        assert torch.equal(loss_of(other, batch), loss_of(model, batch))


@pytest.mark.parametrize(
    ("name", "most"),
    [
        *(("gpt2", 0.46), ("bert", 0.62), ("vit", 0.78), ("t5", 0.44), ("phi3", 0.71)),
        *(("llama", 0.7), ("qwen3", 0.67), ("gemma", 0.7), ("distilbert", 0.65), ("torch encoder", 0.76)),
    ],
)
def test_fewer_bytes_are_saved(name: str, most: float) -> None:
    model, batch = FAMILIES[name][0]().train(), batch_for(name)
    before = saved_bytes(model, **batch)
    swap(model, level="layers", verify=False)
    assert saved_bytes(model, **batch) <= most * before


def _without_dropout(name: str) -> nn.Module:
    model = FAMILIES[name][0]()
    for owner in (*model.modules(), model.config):
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for attribute in ("dropout", "hidden_dropout", "attention_dropout"):  # for calls of F.dropout
            if isinstance(getattr(owner, attribute, None), float):
                setattr(owner, attribute, 0.0)
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "opt", "bloom", "falcon", "gptj"])
def test_the_loss_in_training_makes_no_logits(name: str) -> None:
    model, batch = _without_dropout(name), batch_for(name)
    model.train()
    with torch.no_grad():
        expected = model(**batch).loss
    wanted = gradients(model, batch)
    swap(model, level="layers", batch=batch)
    output = model(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected)
    for got, right in zip(gradients(model, batch), wanted, strict=True):
        torch.testing.assert_close(got, right, atol=1e-6, rtol=1e-4)
    assert model.eval()(**batch).logits is not None
    counted = model.train()(**batch, num_items_in_batch=torch.tensor(11)).loss
    torch.testing.assert_close(counted, expected * 22 / 11)


@pytest.mark.parametrize("name", ["bloom", "falcon", "gptj"])
def test_a_forward_that_makes_a_tuple_has_logits_in_it(name: str) -> None:
    model, batch = _without_dropout(name).train(), batch_for(name)
    wanted = model(**batch, return_dict=False)
    swap(model, level="layers", batch=batch)
    got = model(**batch, return_dict=False)
    assert len(got) == len(wanted)
    torch.testing.assert_close(got[:2], wanted[:2])


class Adapted(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_layer_that_is_replaced_later_is_called() -> None:
    model, batch = FAMILIES["llama"][0]().eval(), batch_for("llama")
    swap(model, level="layers", verify=False)
    layer = model.model.layers[0].mlp  # type: ignore[union-attr, index]
    adapted = Adapted(32, 64, bias=False)
    adapted.weight = layer.gate_proj.weight  # type: ignore[union-attr]
    layer.gate_proj = adapted  # type: ignore[union-attr]
    swapped = loss_of(model, batch)
    unswap(model)
    assert torch.equal(loss_of(model, batch), swapped)


def test_a_hook_is_called() -> None:
    model, batch = FAMILIES["llama"][0]().eval(), batch_for("llama")
    swap(model, level="layers", verify=False)
    called = []
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: called.append(1))  # type: ignore[union-attr, index]
    loss_of(model, batch)
    assert called == [1]


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Linear(8, 16), nn.Linear(16, 8), nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1):
            x = x + 0
        hidden = self.a(x)
        return self.b(self.act(hidden))


def test_where_and_own_rules() -> None:
    model = nn.ModuleDict({"one": Feedforward(), "two": Feedforward()})
    report = swap(model, "tw*", level="layers", verify=False)
    assert [(site.name, site.rules) for site in report.sites] == [("two", ("mlp",))]
    unswap(model)

    def doubled(x: torch.Tensor, *, layer: nn.Linear) -> torch.Tensor:
        return 2 * layer(x)

    rule = Rule("doubled", ("y = layer(x)",), ("x",), ("y",), doubled, {"layer": is_linear})
    report = swap(model["one"], rules=[rule], batch=torch.randn(3, 8))
    assert report.sites == ()
    (skipped,) = report.skipped
    assert skipped.reason.startswith("its error is ")


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="swap takes a module, got Tensor"):
        swap(torch.ones(2))  # type: ignore[arg-type]
    model = Feedforward()
    with pytest.raises(ValueError, match="no level 'layer'"):
        swap(model, level="layer")  # type: ignore[arg-type]
    swap(model, verify=False)
    with pytest.raises(ValueError, match=r"swapped already; call unswap\(model\) first"):
        swap(model)


def test_own_dropout_is_swapped_in_place_of_torchs() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).train()
    swap(model, level="layers", batch=torch.randn(4, 8))
    torch.manual_seed(3)
    dropped = model(torch.ones(64, 8))
    torch.manual_seed(3)
    assert torch.equal(model(torch.ones(64, 8)), dropped)
    assert 0.3 < (dropped == 0).float().mean() < 0.7


@pytest.mark.slow
def test_a_compiled_model_has_no_graph_break() -> None:
    model, batch = FAMILIES["llama"][0]().eval(), batch_for("llama")
    swap(model, level="layers", verify=False)
    expected = loss_of(model, batch)
    compiled = torch.compile(model.model, backend="eager", fullgraph=True)  # type: ignore[arg-type]
    torch.testing.assert_close(compiled(batch["input_ids"]).last_hidden_state, model.model(batch["input_ids"])[0])  # type: ignore[operator]
    assert torch.equal(loss_of(model, batch), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    model, batch = FAMILIES[name][0]().train(), batch_for(name)
    swap(model, level="layers", verify=False)
    results = []
    for enabled in (False, True):
        if enabled:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        torch.manual_seed(5)
        results.append(gradients(model, batch))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted)


def test_tied_weights_stay_tied_and_saved_weights_load(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"][0]()
    swap(model, level="layers", verify=False)
    assert model.lm_head.weight is model.transformer.wte.weight  # type: ignore[union-attr]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = type(model).swapped_from.from_pretrained(tmp_path)  # type: ignore[attr-defined]
    batch = batch_for("gpt2")
    torch.testing.assert_close(loss_of(loaded.eval(), batch), loss_of(model.eval(), batch))


def test_on_the_meta_device_nothing_is_verified() -> None:
    with torch.device("meta"):
        model = Feedforward()
    assert [site.error for site in swap(model, level="layers", verify=False).sites] == [None]


def test_a_weight_that_is_parametrized_later() -> None:
    model, x = Feedforward(), torch.randn(3, 8)
    swap(model, level="layers", verify=False)
    nn.utils.parametrizations.weight_norm(model.a)
    with torch.no_grad():
        model.a.parametrizations.weight.original0.mul_(2)  # type: ignore[union-attr]
    swapped = model(x)
    unswap(model)
    assert torch.equal(model(x), swapped)


@pytest.mark.parametrize("drop", [False, True])
def test_a_sequence(drop: bool) -> None:
    parts = [nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 8), nn.Dropout(0.1)]
    model, x = nn.Sequential(*(part for part in parts if drop or not isinstance(part, nn.Dropout))), torch.randn(3, 8)
    model.eval()
    expected = model(x)
    report = swap(model, level="layers", batch=x)
    assert [site.rules for site in report.sites if site.name == ""] == [("mlp",)]
    assert torch.equal(model(x), expected)
    assert torch.equal(model[:2](x), nn.GELU()(model[0](x)))  # a part has the class, but other modules
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(other(x), expected)
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    model[1] = nn.Tanh()
    model.append(nn.Tanh())
    swapped = model(x)
    unswap(model)
    assert torch.equal(model(x), swapped)


def test_t5_in_16_bits_with_its_last_layers_in_32() -> None:
    model, batch = FAMILIES["t5"][0]().bfloat16().eval(), batch_for("t5")
    for name, module in model.named_modules():
        if name.endswith(".wo"):
            module.float()
    expected = loss_of(model, batch)
    report = swap(model, level="layers", batch=batch)
    assert report.skipped == ()
    assert {"wide_rms_norm", "gated_mlp"} <= {rule for site in report.sites for rule in site.rules}
    torch.testing.assert_close(loss_of(model, batch), expected, atol=2e-2, rtol=1e-2)


def test_a_call_that_cannot_be_copied_is_not_verified() -> None:
    class State:
        def __init__(self, x: torch.Tensor) -> None:
            self.x = x

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.act, self.down = nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)

        def forward(self, state: State) -> torch.Tensor:
            return self.down(self.act(self.up(state.x)))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(8, 8), Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(State(self.first(x)))

    (site,) = swap(Outer(), level="layers", batch=torch.randn(2, 8)).sites
    assert (site.name, site.error) == ("inner", None)


def test_the_gradient_of_a_blocks_input_is_compared_behind_a_frozen_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    from fuselayers.components.swap import call

    model, batch = FAMILIES["gpt2"][0](), batch_for("gpt2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wte" not in name and "wpe" not in name)
    seen = []

    def check(site: Site, module: nn.Module, kind: type, given: Any, **options: Any) -> Site:
        seen.append([one.requires_grad for one in given[0] if isinstance(one, torch.Tensor)])
        return site

    monkeypatch.setattr(call, "check", check)
    swap(model, level="blocks", backend="eager", batch=batch)
    assert seen[0] == [True]
