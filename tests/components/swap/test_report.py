import json

import torch
from torch import nn

from fuselayers.components.swap import Site, Skipped, SwapReport, swap
from fuselayers.components.swap.verify import _backend


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
    assert site.rules == ("mlp", "dropout_residual")
    assert site.backend == "cpp"
    assert site.seconds_before is not None
    assert site.seconds_after is not None
    assert 0 < site.seconds_after < 10
    assert report.saved_before is not None
    assert report.saved_after is not None
    # x of the norm, its result, two statistics a row, the hidden values and relu's, a mask of bytes or floats, x of
    # the last layer; now the same without relu's, and a seed in place of the mask.
    assert report.saved_after == (3 * 4 * 8 + 2 * 4 + 4 * 64) * 4 + 8
    assert report.saved_before >= (3 * 4 * 8 + 2 * 4 + 4 * 64) * 4 + 4 * 8
    assert json.loads(json.dumps(report.to_dict()))["saved_after"] == report.saved_after
    lines = str(report).splitlines()
    assert lines[-1] == (
        f"a call of the model saves {report.saved_after:,} of {report.saved_before:,} bytes: "
        f"{report.saved_after / report.saved_before:.2f}"
    )
    assert "    mlp, dropout_residual" in lines
    assert "    mlp, dropout_residual\n" in report._repr_html_()


def test_the_backend_is_what_ran() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    report = swap(model, level="layers", batch=torch.randn(8, 2))
    assert [(site.name, site.backend) for site in report.sites] == [("1", "cpp")]
    assert "  cpp\n" in str(report)


def test_the_backend_of_what_was_not_verified() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1))
    assert [site.backend for site in swap(model, level="layers", verify=False).sites] == ["auto"]


def test_kernels_are_told_from_the_code_for_a_cpu() -> None:
    seed, loss = ("draw_seed", "cuda", False), ("linear_cross_entropy_losses", "cpu", False)
    assert _backend({seed, loss, ("keep_factors", "cpu", True)}) == "eager"
    assert _backend({seed, loss, ("dropout", "cpu", True)}) == "cpp"
    assert _backend({seed, ("normalise", "cuda", True)}) == "triton"
    assert _backend({("linear_cross_entropy_losses", "cuda", False)}) == "triton"


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
