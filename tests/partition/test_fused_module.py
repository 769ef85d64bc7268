import copy
import inspect
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselayers.partition import FusedModule, disable_fusion, eager_view, fuse, fuse_in_place


class Scaled(nn.Module):
    """A module with a plain number and an extra state."""

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.factor = 2.0
        self.notes = "none"

    def forward(self, x_BD: Tensor, shift: Tensor | None = None) -> Tensor:
        scaled_BD = x_BD * self.weight * self.factor
        return scaled_BD if shift is None else scaled_BD + shift

    def get_extra_state(self) -> str:
        return self.notes

    def set_extra_state(self, state: str) -> None:
        self.notes = state


def test_a_fused_module_is_of_its_class_and_one_with_its_module_and_called_as_it_is() -> None:
    module = Scaled()
    fused = fuse(module, backend="eager")
    assert isinstance(fused, Scaled)
    assert isinstance(fused, FusedModule)
    assert type(module) is type(eager_view(fused)) is Scaled
    fused.factor = 5.0
    module.weight = nn.Parameter(torch.ones(3))
    fused.eval()
    assert (module.factor, module.training) == (5.0, False)
    assert fused.weight is module.weight
    x_BD, shift = torch.randn(2, 3), torch.randn(3)
    assert torch.equal(fused(x_BD), x_BD * 5)
    for owner in (fused, type(fused)):  # Trainers look up the names of labels in the type
        assert list(inspect.signature(owner.forward).parameters)[-2:] == ["x_BD", "shift"]
    assert torch.equal(fused(x_BD=x_BD, shift=shift), module(x_BD, shift))
    assert torch.equal(fused.forward(x_BD, shift=shift), module(x_BD, shift))
    fused.load_state_dict({"weight": torch.zeros(3), "_extra_state": "loaded"})
    assert (module.weight.sum(), module.notes) == (0, "loaded")


def test_a_forward_of_the_module_alone_is_the_one_that_is_fused() -> None:
    module = Scaled()
    module.__dict__["forward"] = torch.sin
    fused, x_BD = fuse(module, backend="eager"), torch.randn(2, 3)
    for layer in (fused, copy.deepcopy(fused)):
        assert torch.equal(layer(x_BD), x_BD.sin())
        assert layer.report().graphs


def test_hooks_run_around_the_fused_forward() -> None:
    seen: list[Any] = []
    fused = fuse(Scaled(), backend="eager", fullgraph=True)
    fused.register_forward_hook(lambda module, inputs, output: seen.append(type(output)))  # Dynamo would break here
    fused.register_full_backward_hook(lambda module, *gradients: seen.append(module))
    fused(torch.randn(2, 3, requires_grad=True)).sum().backward()
    assert seen == [Tensor, fused]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))], ids=["copy", "pickle"]
)
def test_copies_are_fused_and_keep_hooks(copied: Callable[[Any], Any]) -> None:
    fused = fuse(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend="eager")
    fused.register_forward_hook(_hundredfold)
    again, x = copied(fused), torch.ones(2, 4)
    assert isinstance(again, FusedModule)
    assert not again.report().graphs
    torch.testing.assert_close(again(x), fused(x))
    torch.testing.assert_close(again(x), 100 * again[1](again[0](x)))
    assert len(again.report().graphs) == 1
    assert again[0].weight is not fused[0].weight
    remade = fuse(Remade(4), backend="eager")
    again = copied(remade)
    torch.testing.assert_close(again(x), remade(x))
    assert len(again.report().graphs) == 1


def _hundredfold(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return 100 * output


def test_modules_of_a_kind_share_their_graphs() -> None:
    small = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(3)]
    wide = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    layers = nn.Sequential(small[0], wide, *small[1:])
    plain = copy.deepcopy(layers).eval()
    fuse_in_place(layers, backend="eager", partition="min_cut")
    layers = pickle.loads(pickle.dumps(layers.eval()))
    x = torch.randn(2, 4, requires_grad=True)  # like the output of a layer
    layers(x).sum().backward()
    torch.testing.assert_close(layers(x), plain(x))
    assert [len(layer.report().graphs) for layer in layers] == [1, 1, 1, 1]
    layers[2].train()
    layers(x).sum().backward()
    assert [len(layer.report().graphs) for layer in layers] == [2, 1, 2, 2]
    assert all(parameter.grad is not None for parameter in layers.parameters())


class Remade(nn.Module):
    """A module whose `__reduce__` names the function that copies it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)  # type: ignore[no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        return _remade, (self.linear.in_features, self.state_dict())


def _remade(width: int, state: dict[str, Tensor]) -> Remade:
    module = Remade(width)
    module.load_state_dict(state)
    return module


def test_a_parametrized_fused_module_is_seen_plain_and_fused_again() -> None:
    layer = fuse(nn.Linear(4, 4), backend="eager")
    torch.nn.utils.parametrizations.weight_norm(layer)
    x = torch.ones(1, 4)
    wanted = nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(eager_view(layer)(x), wanted)
    torch.testing.assert_close(fuse(layer, backend="eager")(x), wanted)


def test_a_hook_inside_one_of_equal_modules_runs_whenever_it_was_set() -> None:
    layers = [nn.Sequential(nn.Linear(2, 2)) for _ in range(3)]
    layers[1][0].register_forward_hook(lambda module, inputs, output: output * 0 + 5)
    fuse_in_place(layers, backend="eager", partition="min_cut")
    x = torch.ones(1, 2)
    for layer in layers:
        layer(x)
    assert torch.equal(layers[1](x), torch.full((1, 2), 5.0))
    layers[2][0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0,))
    torch.testing.assert_close(layers[2](x)[0], layers[2][0].bias)
    torch.testing.assert_close(layers[0](x), nn.functional.linear(x, layers[0][0].weight, layers[0][0].bias))


def test_disable_fusion_is_for_its_own_thread() -> None:
    model = nn.Sequential(fuse(nn.Linear(2, 2), backend="eager"))
    entered, left = threading.Event(), threading.Event()

    def until_the_other_has_left() -> None:
        with disable_fusion():
            entered.set()
            assert left.wait(60)

    other = threading.Thread(target=until_the_other_has_left)
    with disable_fusion():
        other.start()
        assert entered.wait(60)
        model(torch.ones(1, 2))
        assert model[0].report().graphs == ()
    model(torch.ones(1, 2))
    assert len(model[0].report().graphs) == 1  # this thread has left `disable_fusion`
    left.set()
    other.join()


def test_sharded_modules_are_fused_and_train_as_plain_ones_do(one_process_mesh: Any) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    plain = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 1)))
    sharded = copy.deepcopy(plain)
    fuse_in_place(sharded, backend="eager", partition="min_cut")
    for part in (sharded[0], sharded[2], sharded):
        fully_shard(part, mesh=one_process_mesh)
    assert isinstance(sharded[0], FSDPModule)
    x = torch.randn(5, 3)
    for _ in range(2):
        plain(x).square().sum().backward()
        sharded(x).square().sum().backward()
    for expected, shard in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(shard.grad.full_tensor(), expected.grad)
    assert all(part.report().graphs for part in sharded)


def test_a_fused_module_is_exported_for_any_size() -> None:
    fused, x_BD = fuse(Scaled(), backend="eager"), torch.randn(7, 3)
    sizes = {0: torch.export.Dim("B", min=2, max=64)}
    for shapes in ({"x_BD": sizes}, (sizes,)):
        exported = torch.export.export(fused, (torch.randn(4, 3),), dynamic_shapes=shapes)
        torch.testing.assert_close(exported.module()(x_BD), eager_view(fused)(x_BD))


@pytest.mark.slow
def test_generate_of_transformers_is_fused() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=48
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens_BT = torch.randint(1, 50, (1, 5))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    fused = fuse(model, backend="eager", fallback=())
    assert torch.equal(fused.generate(tokens_BT, **options), model.generate(tokens_BT, **options))
    assert len(fused.report().graphs) == 3  # the prompt, the first step, all others


def test_a_lazy_module_stays_fused_once_it_has_parameters() -> None:
    fused, x = fuse(nn.LazyLinear(4), backend="eager", fallback=()), torch.randn(2, 3)
    for _ in range(2):
        torch.testing.assert_close(fused(x), nn.functional.linear(x, fused.weight, fused.bias))
    assert {graph.served_by for graph in fused.report().graphs} == {"eager"}
    assert copy.deepcopy(fused).report() is not None
