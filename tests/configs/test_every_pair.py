"""Every pair of feedforward, norm, residual, attention and position builds from a config and learns, or is refused.

The combinations are a pairwise covering set: each pair of values of two groups is in at least one combination.
"""

import itertools

import pytest
import torch

from fuselayers.components import names
from fuselayers.components.attention.inputs import is_able
from fuselayers.configs import COMPONENT_GROUPS, build

GROUPS = sorted(COMPONENT_GROUPS)
VALUES = {group: names(group) for group in GROUPS}
# The input of an attention that a position uses.
NEEDS = {"rotary": "rotate", "alibi": "distance_bias", "relative": "distance_bias"}


def fits(row: dict[str, str]) -> bool:
    if "attention" not in row or "position" not in row:
        return True
    need = NEEDS.get(row["position"])
    return need is None or is_able(row["attention"], need)


def pairs_of(row: dict[str, str]) -> set[tuple[str, str, str, str]]:
    return {(a, row[a], b, row[b]) for a, b in itertools.combinations(GROUPS, 2) if a in row and b in row}


def covering_rows() -> list[dict[str, str]]:
    """Greedy: each row starts from a pair that is left; its other values cover as many other pairs as possible."""
    left = {
        pair
        for a, b in itertools.combinations(GROUPS, 2)
        for x, y in itertools.product(VALUES[a], VALUES[b])
        if fits({a: x, b: y})
        for pair in [(a, x, b, y)]
    }
    rows = []
    while left:
        a, x, b, y = min(left)
        row = {a: x, b: y}
        for group in GROUPS:
            if group not in row:
                able = [value for value in VALUES[group] if fits({**row, group: value})]
                row[group] = max(able, key=lambda value: len(pairs_of({**row, group: value}) & left))
        left -= pairs_of(row)
        rows.append(row)
    return rows


ROWS = covering_rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_it_learns(row: dict[str, str]) -> None:
    causal = is_able(row["attention"], "causal")
    source = "gpt2_tiny" if causal else "bert_tiny"
    overrides = [f"{group}={value}" for group, value in row.items()]
    model = build(source, [*overrides, "model.dropout=0.1", "model.init_std=0.2", "fusion=off"])
    tokens_BT, targets_BT = torch.randint(256, (2, 2, 24))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        at_first = model.eval()(tokens_BT, targets_BT).item()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens_BT, targets_BT).backward()
        optimizer.step()
    with torch.no_grad():
        assert model.eval()(tokens_BT, targets_BT).item() < at_first
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    # The few tokens here may not reach every expert.
    unused = [
        name
        for name, parameter in model.named_parameters()
        if torch.equal(parameter, before[name]) and ".experts." not in name
    ]
    assert not unused, f"no step changed {unused}"


# All pairs that do not fit: attentions and positions are registered separately, and either may fail to refuse.
@pytest.mark.parametrize(
    ("attention", "position"),
    [
        pair
        for pair in itertools.product(VALUES["attention"], NEEDS)
        if not fits({"attention": pair[0], "position": pair[1]})
    ],
)
def test_an_attention_that_cannot_use_a_position_says_so(attention: str, position: str) -> None:
    text = (
        rf"^attention '{attention}' cannot .*, which position '{position}' needs; those that can: .*multi_head|"
        rf"^position '{position}' has a bias for each head, and this attention has no heads; choose an attention with "
    )
    with pytest.raises(ValueError, match=text):
        build("bert_tiny", [f"attention={attention}", f"position={position}", "fusion=off"])
