import copy
import inspect
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuselayers.partition import FallbackWarning, FusedModule, disable_fusion, fuse


class Doubling(nn.Linear):
    note = "kept"


def counted(module: nn.Module) -> tuple[FusedModule, list[Any]]:
    calls: list[Any] = []

    def call(*args: Any) -> Any:
        calls.append(args)
        return module(*args)

    return FusedModule(module, call), calls


def test_a_call_goes_through_the_fused_function() -> None:
    module = Doubling(3, 2)
    fused, calls = counted(module)
    x = torch.randn(1, 3)
    assert torch.equal(fused(x), module(x))
    assert len(calls) == 1


def test_a_parameter_replaced_on_one_side_is_replaced_on_the_other() -> None:
    module = Doubling(3, 2)
    fused, _ = counted(module)
    module.weight = nn.Parameter(torch.zeros(2, 3))
    assert fused.weight is module.weight
    fused.bias = nn.Parameter(torch.ones(2))
    assert module.bias is fused.bias
    fused.register_buffer("extra", torch.ones(1))
    assert "extra" in module.state_dict()


def test_an_option_set_on_the_view_reaches_the_module_that_runs() -> None:
    module = Doubling(3, 2)
    fused, _ = counted(module)
    fused.note = "changed"
    assert module.note == "changed"
    del fused.note
    assert module.note == "kept"
    hooked = []
    fused.register_full_backward_hook(lambda *args: hooked.append(1))
    fused(torch.randn(1, 3, requires_grad=True)).sum().backward()
    assert hooked == [1]


def test_mode_is_one_mode() -> None:
    module = Doubling(3, 2).eval()
    fused, _ = counted(module)
    assert not fused.training
    fused.train()
    assert module.training


def test_is_shown_as_what_it_is() -> None:
    fused, _ = counted(Doubling(3, 2))
    assert repr(fused) == "FusedModule(fused Doubling)"
    assert fused.note == "kept"


def test_a_notebook_shows_what_serves_it() -> None:
    fused: Any = fuse(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    page = "<p><b>fused Sequential</b></p><pre>nothing is compiled yet: call the function first</pre><details>"
    assert fused._repr_html_().startswith(page)
    fused(torch.ones(1, 2))
    assert "<pre>Sequential(float32[2, 2], " in fused._repr_html_()
    assert "eager, " in fused._repr_html_()

    class Odd(nn.Linear):
        def extra_repr(self) -> str:
            return "<script>"

    page = FusedModule(nn.Sequential(Odd(1, 1)), fused.fused)._repr_html_()
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


def test_a_view_of_a_container_is_one() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    view = copy.deepcopy(fuse(module, backend="eager"))
    view = pickle.loads(pickle.dumps(view))
    assert isinstance(view, FusedModule)
    assert len(view) == 2
    assert view[0] is view.module[0]
    assert list(view) == list(view.module)
    view[1] = nn.Tanh()
    assert isinstance(view.module[1], nn.Tanh)
    del view[1]
    x = torch.randn(2, 3)
    torch.testing.assert_close(view(x), view.module(x))
    torch.testing.assert_close(torch.compile(view, backend="eager", fullgraph=True)(x), view.module(x))
    assert "relu" in fuse(nn.ModuleDict({"relu": nn.ReLU()}), backend="eager")


@pytest.mark.parametrize("module", [nn.Linear(2, 2), nn.Sequential()], ids=["plain", "empty container"])
def test_a_view_is_true_where_the_module_is(module: nn.Module) -> None:
    assert bool(fuse(module, backend="eager")) == bool(module)


def test_trainers_read_the_signature_of_the_type() -> None:
    """Hugging Face's Trainer looks there for the names of labels."""
    view = fuse(nn.Bilinear(2, 2, 2), backend="eager")
    assert list(inspect.signature(type(view).forward).parameters)[1:] == ["input1", "input2"]
    x = torch.randn(3, 2)
    torch.testing.assert_close(type(view).forward(view, x, x), view.module(x, x))


class Particular(nn.Module):
    """Overrides what a module may: its mode, and what it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.scale = 2.0
        self.notes = "none"
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}hooked": 1}))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.norm(x) * self.scale)

    def train(self, mode: bool = True) -> "Particular":
        super().train(mode)
        self.norm.eval()
        return self

    def get_extra_state(self) -> str:
        return self.notes

    def set_extra_state(self, state: str) -> None:
        self.notes = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}scale"] = torch.tensor(self.scale)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        self.scale = float(state_dict.pop(f"{prefix}scale"))
        state_dict.pop(f"{prefix}hooked")
        super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_module_that_overrides_train_keeps_its_say() -> None:
    module = Particular()
    view = fuse(module, backend="eager")
    assert view.train() is view
    assert (module.training, module.norm.training) == (True, False)
    view.eval()
    assert not module.training


@pytest.mark.parametrize("holder", [lambda module: module, nn.Sequential], ids=["alone", "inside another"])
def test_what_a_module_saves_besides_is_saved_and_loaded(holder: Any) -> None:
    plain, module = Particular(), Particular()
    plain.scale, plain.notes = 5.0, "kept"
    view = holder(fuse(module, backend="eager"))
    assert view.state_dict().keys() == holder(Particular()).state_dict().keys()
    state = holder(plain).state_dict()
    view.load_state_dict(dict(state))
    assert (module.scale, module.notes) == (5.0, "kept")


def test_converting_the_view_converts_the_module_once() -> None:
    module = nn.Linear(4, 4)
    view = fuse(module, backend="eager")
    assert view.to(torch.float64) is view
    assert module.weight.dtype == torch.float64
    assert view(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda view: pickle.loads(pickle.dumps(view))], ids=["copy", "pickle"]
)
def test_hooks_on_the_view_are_copied_with_it(copied: Any) -> None:
    view = fuse(nn.Linear(4, 4), backend="eager")
    view.register_forward_hook(_hundredfold)
    again = copied(view)
    x = torch.ones(2, 4)
    torch.testing.assert_close(again(x), view(x))
    torch.testing.assert_close(again(x), 100 * again.module(x))


def test_a_compiled_view_can_be_pickled() -> None:
    view = fuse(nn.Linear(4, 4), backend="eager")
    view.compile(backend="eager")
    again, x = pickle.loads(pickle.dumps(view)), torch.ones(2, 4)
    torch.testing.assert_close(again(x), view(x))


def _hundredfold(module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return 100 * output


def test_a_function_applied_to_all_parts_gets_the_module_and_not_the_view() -> None:
    model = nn.Sequential(fuse(nn.Sequential(nn.Linear(2, 2)), backend="eager"), fuse(nn.Linear(2, 2), backend="eager"))
    kinds: list[type] = []
    assert model.apply(lambda part: kinds.append(type(part))) is model
    assert kinds == [nn.Linear, nn.Sequential, nn.Linear, nn.Sequential]


def test_state_dict_hooks_on_the_view_run() -> None:
    fused, seen = fuse(nn.Linear(2, 2), backend="eager"), []
    fused.register_state_dict_pre_hook(lambda *args: seen.append("before saving"))
    fused.register_state_dict_post_hook(lambda *args: seen.append("after saving"))
    fused.register_load_state_dict_pre_hook(lambda *args: seen.append("before loading"))
    fused.register_load_state_dict_post_hook(lambda *args: seen.append("after loading"))
    fused.load_state_dict(fused.state_dict())
    assert seen == ["before saving", "after saving", "before loading", "after loading"]


def test_disable_fusion_in_two_threads_leaves_views_as_they_were() -> None:
    model = nn.Sequential(fuse(nn.Linear(2, 2), backend="eager"))
    fused, entered, left = model[0].fused, threading.Event(), threading.Event()

    def until_the_other_has_left() -> None:
        with disable_fusion():
            entered.set()
            assert left.wait(60)

    other = threading.Thread(target=until_the_other_has_left)
    with disable_fusion():
        other.start()
        assert entered.wait(60)
        model(torch.ones(1, 2))
        assert copy.deepcopy(model)[0].report().graphs == ()
    model(torch.ones(1, 2))
    assert len(model[0].report().graphs) == 1  # of this thread, which is no longer within it
    left.set()
    other.join()
    assert model[0].fused is fused


@pytest.fixture
def gloo_mesh() -> Iterator[Any]:
    if not dist.is_available():
        pytest.skip("this torch was built without torch.distributed")
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield dist.device_mesh.init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_sharded_views_are_fused_and_train_as_their_modules_do(gloo_mesh: Any) -> None:
    from torch.distributed.fsdp import FSDPModule, fully_shard

    plain = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Sequential(nn.Linear(7, 1)))
    views = [fuse(copy.deepcopy(part), backend="eager") for part in plain]
    sharded = nn.Sequential(*views)
    for part in (views[0], views[2], sharded):
        fully_shard(part, mesh=gloo_mesh)
    assert isinstance(views[0], FSDPModule)
    assert type(views[0].module) is nn.Linear
    x = torch.randn(5, 3)
    for _ in range(2):
        plain(x).square().sum().backward()
        sharded(x).square().sum().backward()
    for expected, shard in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(shard.grad.full_tensor(), expected.grad)
    assert all(view.report().graphs for view in views)


def test_a_parametrization_of_the_view_is_refused() -> None:
    fused = fuse(nn.Linear(3, 2), backend="eager")
    said = (
        "a parametrization must be on the module that runs, got the fused view of it; make Linear anew and parametrize "
        "it before it is fused"
    )
    with pytest.raises(ValueError, match=f"^{said}$"):
        nn.utils.parametrizations.weight_norm(fused)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x_BD: Tensor, view: Tensor | None = None) -> Tensor:
        return x_BD * self.weight if view is None else x_BD * self.weight + view


def test_a_view_is_called_as_its_module_is() -> None:
    module = Scaled()
    fused = fuse(module, backend="eager")
    x_BD, shift = torch.randn(2, 3), torch.randn(3)
    assert inspect.signature(fused.forward) == inspect.signature(module.forward)
    assert torch.equal(fused(x_BD=x_BD, view=shift), module(x_BD, shift))
    assert torch.equal(fused.forward(x_BD, view=shift), module(x_BD, shift))
    module.__dict__["forward"] = fuse(torch.sin, backend="eager")
    assert torch.equal(fuse(module, backend="eager")(x_BD), x_BD.sin())


@pytest.mark.parametrize("by_name", [False, True])
def test_a_view_is_exported_for_any_size(by_name: bool) -> None:
    fused = fuse(Scaled(), backend="eager")
    sizes = {0: torch.export.Dim("B", min=2, max=64)}
    shapes = {"x_BD": sizes} if by_name else (sizes,)
    exported = torch.export.export(fused, (torch.randn(4, 3),), dynamic_shapes=shapes)
    x_BD = torch.randn(7, 3)
    torch.testing.assert_close(exported.module()(x_BD), fused.module(x_BD))


@pytest.mark.slow
def test_generate_of_transformers_says_that_it_runs_unfused_and_how_it_does_not() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50, num_hidden_layers=2, num_attention_heads=2, hidden_size=32, intermediate_size=48
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens_BT = torch.randint(1, 50, (1, 5))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(tokens_BT, **options)
    fused = fuse(model, backend="eager", fallback=())
    text = r"^generate runs unfused: .* set model\.forward = fuse\(model\.forward\) and call model\.generate$"
    with pytest.warns(FallbackWarning, match=text) as caught:
        assert torch.equal(fused.generate(tokens_BT, **options), expected)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        fused.generate(tokens_BT, **options)  # said once

    model.forward = fuse(model.forward, backend="eager", fallback=())
    assert torch.equal(model.generate(tokens_BT, **options), expected)
    assert len(model.forward.report().graphs) == 3  # the prompt, the first step, all others
