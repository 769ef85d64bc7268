import json

import torch
from torch import nn

from fuselayers.components.swap import Site, Skipped, SwapReport, swap


class ALayerWithALongName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.drop = nn.Linear(8, 64), nn.Linear(64, 8), nn.LayerNorm(8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.relu(self.up(self.norm(x)))))


def test_a_timed_report() -> None:
    model = nn.Sequential(ALayerWithALongName(), nn.Linear(8, 2))
    report = swap(model, level="layers", batch=torch.randn(4, 8), timed=True)
    (site,) = (one for one in report.sites if one.kind == "ALayerWithALongName")
    assert site.rules == ("layer_norm_mlp", "dropout_residual")
    assert site.backend == "eager"
    assert site.seconds_before is not None
    assert site.seconds_after is not None
    assert 0 < site.seconds_after < 10
    assert report.saved_before is not None
    assert report.saved_after is not None
    # x of the norm, its result, two statistics a row, the hidden values and relu's, a mask of bytes or floats, x of
    # the last layer; now x, the hidden values and a seed, and that x.
    assert report.saved_after == (2 * 4 * 8 + 4 * 64) * 4 + 8
    assert report.saved_before >= (3 * 4 * 8 + 2 * 4 + 4 * 64) * 4 + 4 * 8
    assert json.loads(json.dumps(report.to_dict()))["saved_after"] == report.saved_after
    lines = str(report).splitlines()
    assert lines[-1] == (
        f"a call of the model saves {report.saved_after:,} of {report.saved_before:,} bytes: "
        f"{report.saved_after / report.saved_before:.2f}"
    )
    assert "    layer_norm_mlp, dropout_residual" in lines
    assert "<td>layer_norm_mlp, dropout_residual</td>" in report._repr_html_()


def test_the_text_has_80_columns() -> None:
    rules = tuple(f"a_rule_with_a_long_name_{number}" for number in range(5))
    report = SwapReport(
        "layers",
        (
            Site(
                "model.layers.0.mlp",
                "AClassWithAVeryVeryLongNameIndeed",
                rules,
                "inductor",
                1e-7,
                1e-7,
                100,
                50,
                1.0,
                0.5,
            ),
        ),
        (Skipped("model.layers.1.mlp", "AClass<T>", "it raises ValueError: " + "because " * 20),),
        2_000_000_000_000,
        1_000_000_000_000,
    )
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    assert "0.50   0.50  inductor" in str(report)
    assert "a_rule_with_a_long_name_4" in str(report)
    assert "AClass&lt;T&gt;" in report._repr_html_()


def test_a_model_that_does_not_run_in_training_has_no_total() -> None:
    class Evaluating(ALayerWithALongName):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                raise RuntimeError("not in training")
            return self.down(torch.relu(self.up(self.norm(x))))

    model = Evaluating().train()
    assert swap(model, level="layers", batch=torch.randn(2, 8)).saved_before is None
    assert model.training
