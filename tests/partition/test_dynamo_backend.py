from typing import Any

import pytest
import torch
from torch import nn

from fuselayers.partition import budget, explain, saved_bytes
from fuselayers.partition.dynamo_backend import fuselayers


@pytest.mark.parametrize("partition", ["min_cut", "budget:0.4", budget(0.4)], ids=str)
def test_a_model_saves_what_explain_says(partition: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16), nn.GELU())
    x = torch.randn(8, 16)
    compiled = torch.compile(model, backend=fuselayers, options={"backend": "eager", "partition": partition})
    kept = saved_bytes(compiled, x, parameters=model.parameters())
    assert kept == explain(model, x, backend="eager", partition=partition).totals["this"].saved_bytes
    torch.testing.assert_close(compiled.eval()(x), model.eval()(x))


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (
            {"options": {"partitoin": "min_cut"}},
            r"no option of the backend 'fuselayers' 'partitoin'; did you mean 'part",
        ),
        ({"options": {"compress": "int4"}}, r"no compression 'int4'; did you mean 'int8'"),
        (
            {"mode": "max-autotune"},
            r"the backend 'fuselayers' has no mode 'max-autotune'; leave it out, or use options",
        ),
    ],
)
def test_errors(chosen: Any, text: str) -> None:
    with pytest.raises(Exception, match=text):
        torch.compile(lambda x: x * 2, backend=fuselayers, **chosen)(torch.ones(2))
