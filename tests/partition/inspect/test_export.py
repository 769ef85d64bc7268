from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuselayers.partition.inspect.export import JointGraphExport, Spec, joint_graph


class Block(nn.Module):
    """Two layers with a tied weight, a buffer that forward writes to, and a plain tensor as an attribute."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, **options)
        self.norm = nn.BatchNorm1d(8, **options)
        self.down = nn.Linear(8, 8, bias=False, **options)
        self.down.weight = self.up.weight
        self.scale = torch.full((8,), 2.0, **options)

    def forward(self, x: Tensor, masks: dict[str, list[Tensor]]) -> dict[str, Any]:
        hidden = F.gelu(self.norm(self.up(x)))
        return {"out": self.down(hidden) * self.scale, "parts": [hidden * masks["keep"][0]]}


def arguments(**options: Any) -> tuple[Tensor, dict[str, list[Tensor]]]:
    return torch.randn(4, 8, requires_grad=True, **options), {"keep": [torch.ones(4, 8, **options)]}


def by_kind(exported: JointGraphExport, kind: str) -> list[str]:
    return [spec.target for spec in (*exported.inputs, *exported.outputs) if spec.kind == kind]


class TestJointGraph:
    def test_values_and_gradients_are_those_of_autograd(self) -> None:
        torch.manual_seed(1)
        block = Block()
        x, masks = arguments()
        exported = joint_graph(block, x, masks)
        named = {**dict(block.named_parameters()), **{name: buffer.clone() for name, buffer in block.named_buffers()}}
        named |= {"scale": block.scale, "x": x, "masks['keep'][0]": masks["keep"][0]}
        result = block(x, masks)
        outputs = {"result['out']": result["out"], "result['parts'][0]": result["parts"][0]}
        tangents = {name: torch.randn_like(value) for name, value in outputs.items()}
        path_of = {spec.name: spec.target for spec in exported.outputs if spec.kind == "output"}
        values = [
            tangents[path_of[spec.target]] if spec.kind == "gradient" else named[spec.target].detach()
            for spec in exported.inputs
        ]
        wanted = [name for name, value in named.items() if value.requires_grad]
        gradients = torch.autograd.grad(
            list(outputs.values()), [named[name] for name in wanted], [tangents[name] for name in outputs]
        )
        expected = {
            **{("output", name): value for name, value in outputs.items()},
            **{("gradient", name): value for name, value in zip(wanted, gradients, strict=True)},
            **{("mutation", name): value for name, value in block.named_buffers()},
        }
        got = {
            (spec.kind, spec.target): value
            for spec, value in zip(exported.outputs, exported.module(*values), strict=True)
        }
        torch.testing.assert_close(got, expected)

    def test_it_writes_to_none_of_its_inputs(self) -> None:
        exported = joint_graph(Block(), *arguments())
        targets = [
            node.target for node in exported.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)
        ]
        assert [target for target in targets if target._schema.is_mutable] == []

    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_parameters_and_buffers_have_the_names_of_the_module(self, device: str) -> None:
        block = Block(device=device)
        exported = joint_graph(block, *arguments(device=device))
        assert sorted(by_kind(exported, "parameter")) == sorted(name for name, _ in block.named_parameters())
        assert sorted(by_kind(exported, "buffer")) == sorted([*(name for name, _ in block.named_buffers()), "scale"])
        assert by_kind(exported, "argument") == ["x", "masks['keep'][0]"]

    def test_gradients_name_what_they_belong_to(self) -> None:
        x, weight = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
        exported = joint_graph(lambda x, weight: ((x * weight), (x.sin(), 3)), x, weight)
        assert exported.inputs == (
            Spec("primals_1", "argument", "x"),
            Spec("primals_2", "argument", "weight"),
            Spec("tangents_1", "gradient", "mul"),
            Spec("tangents_2", "gradient", "sin"),
        )
        assert exported.outputs[:2] == (
            Spec("mul", "output", "result[0]"),
            Spec("sin", "output", "result[1][0]"),
        )
        gradients = [(spec.kind, spec.target) for spec in exported.outputs[2:]]
        assert gradients == [("gradient", "x"), ("gradient", "weight")]

    def test_the_listing(self) -> None:
        exported = joint_graph(lambda x: (x * 2).sin(), torch.randn(4, requires_grad=True, dtype=torch.bfloat16))
        # Leave out the comments, which differ between versions of torch.
        lines = [line for line in str(exported).splitlines() if line and line.lstrip()[0] != "#"]
        assert lines == [
            "inputs:",
            "  primals_1: argument x",
            "  tangents_1: gradient sin",
            "outputs:",
            "  sin: output result",
            "  mul_2: gradient x",
            "class GraphModule(torch.nn.Module):",
            '    def forward(self, primals_1: "bf16[4]", tangents_1: "bf16[4]"):',
            '        mul: "bf16[4]" = torch.ops.aten.mul.Tensor(primals_1, 2);  primals_1 = None',
            '        sin: "bf16[4]" = torch.ops.aten.sin.default(mul)',
            '        cos: "bf16[4]" = torch.ops.aten.cos.default(mul);  mul = None',
            '        mul_1: "bf16[4]" = torch.ops.aten.mul.Tensor(tangents_1, cos);  tangents_1 = cos = None',
            '        mul_2: "bf16[4]" = torch.ops.aten.mul.Tensor(mul_1, 2);  mul_1 = None',
            "        return (sin, mul_2)",
        ]


def breaks(x: Tensor) -> Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.exp()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: joint_graph(3), TypeError, r"^joint_graph takes a function or a module, got int$"),  # type: ignore[arg-type]
        (
            lambda: joint_graph(breaks, torch.ones(2, requires_grad=True)),
            ValueError,
            rf"^joint_graph needs one graph, and breaks breaks it at .*test_export.py:"
            rf"{breaks.__code__.co_firstlineno + 2} \(Call to `torch._dynamo.graph_break\(\)`\); change that line, or",
        ),
        (
            lambda: joint_graph(torch.sin, torch.ones(2)),
            ValueError,
            r"^joint_graph needs a backward, and no output of sin requires grad here; give it a parameter or an argu",
        ),
    ],
)
def test_errors(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()
