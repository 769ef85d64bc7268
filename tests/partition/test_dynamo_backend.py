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
    ("options", "said"),
    [
        ({"partitoin": "default"}, r"no option of the backend 'fuselayers' 'partitoin'; did you mean 'part"),
        ({"partition": "mincut"}, r"did you mean 'min_cut'"),
        ({"compress": "int4"}, r"no compression 'int4'; did you mean 'int8'"),
        ({"backend": "inducter"}, r"no backend 'inducter'; did you mean 'inductor'"),
    ],
)
def test_errors(options: dict[str, str], said: str) -> None:
    with pytest.raises(Exception, match=said):
        torch.compile(lambda x: x * 2, backend=fuselayers, options=options)(torch.ones(2))


def test_a_mode_is_refused() -> None:
    text = r"the backend 'fuselayers' has no mode 'max-autotune'; leave it out, or use options"
    with pytest.raises(Exception, match=text):
        torch.compile(lambda x: x * 2, backend=fuselayers, mode="max-autotune")(torch.ones(2))
