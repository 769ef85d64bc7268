"""initialise -- a model's initial weights, by one of the schemes from the literature.

    W   [O, I]   a matrix: I values in, O values out (a table of embeddings: [V, D])
    D   the width of the model, L its number of blocks, J the number of branches that join its stream

    scheme     embeddings, head      into the stream          other matrices
    gpt2       std                   std / sqrt(J)            std
    bert       std                   std                      std
    small      sqrt(2 / (5 D))       2 / (L sqrt(D))          sqrt(2 / (5 I))
    deepnorm   std                   xavier normal, beta      xavier normal; beta for values and feedforwards
    vit        std; head 0           xavier uniform           xavier uniform
    mup        std                   std sqrt(B/D) / sqrt(J)  std sqrt(B/D), B the base width

An entry is the standard deviation of a normal distribution, unless it names another distribution. `attention.out`,
`cross_attention.out` and `feedforward.down`, including those of experts, lead into the stream. The projection of
patches is a module inside one named `patch`. It counts as an embedding, but with vit as another matrix. Biases are
zero, weights of norms one.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn

from .option import NotNegative, Positive, Size, checked

Scheme = Literal["gpt2", "bert", "small", "deepnorm", "vit", "mup"]

SCHEMES: Final[tuple[Scheme, ...]] = get_args(Scheme)

_OUT: Final = re.compile(r"(?:^|\.)(?:cross_)?attention\.out$")
_FEEDFORWARD: Final = re.compile(r"(?:^|\.)feedforward(?:\.|$)")
_PATCH: Final = re.compile(r"(?:^|\.)patch(?:\.|$)")
_DOWN: Final = re.compile(r"(?:^|\.)feedforward\.(?:(?:experts|shared)\.\d+\.)?down$")
# Name of a projection -> the matrices that are packed in its rows, in this order.
_PACKED: Final[dict[str, tuple[str, ...]]] = {
    "qkv": ("query", "key", "value"),
    "kv": ("key", "value"),
    "q": ("query",),
    "k": ("key",),
    "v": ("value",),
}
_INTO_STREAM: Final = ("out", "down")
_OUTSIDE: Final = ("embedding", "head", "patch")
# mup does not scale these with the width.
_NOT_SCALED: Final = (*_OUTSIDE, "without_width")
_VIT_TOKEN_STD: Final = 1e-6


@checked
def initialise(
    model: nn.Module,
    scheme: Scheme,
    *,
    num_layers: Size,
    num_decoder_layers: Size | None = None,
    std: NotNegative = 0.02,
    base_width: Size | None = None,
) -> None:
    """Set every parameter of a model to its initial value. Models call it when they are built.

    Call it after `model.to_empty(device=...)` of a model from the meta device: it fills every value. This function
    fills the matrices. All other parameters, and buffers, are filled by the `reset_parameters()` of the module that
    owns them, which may also overwrite the modules inside it. A class lists linear layers that do not grow with the
    model, such as Linformer's [P, L] along the tokens, in a frozenset `without_width`.

    The sources. gpt2: Radford et al. 2019, section 2.3. bert: Devlin et al. 2018, normal rather than truncated normal
    as in the common PyTorch port. small: Nguyen and Salazar 2019 (SmallInit), and for the matrices into the stream
    Wang and Komatsuzaki 2021 (`wang_init`), together as in GPT-NeoX-20B (Black et al. 2022, section 2.1). deepnorm:
    Wang et al. 2022, figure 2. vit: the released code of Chen et al. 2021 (MoCo v3), where packed queries, keys and
    values count as three matrices and a class token has the deviation 1e-6; the head that starts at zero is from
    Dosovitskiy et al. 2020, section 3.2. mup: Yang et al. 2022 (Tensor Programs V), table 8; it equals gpt2 if D = B.
    With mup the model multiplies its logits by B / D, and the optimizer needs `parameter_groups`. A wider model should
    have more heads; larger heads need scores scaled by sqrt(base head_dim) / head_dim.

    Args:
        model: any module; it is changed in place. Its width D is its attribute `hidden_dim`; without it, small uses the
            width of each table.
        scheme: one of `SCHEMES`.
        num_layers: L, number of blocks; for an encoder-decoder, those of the encoder.
        num_decoder_layers: number of blocks in the decoder of an encoder-decoder, under the name `decoder`.
        std: the standard deviation in the table of this module; small uses it only for class tokens.
        base_width: B, the width at which std and the learning rate were tuned; for mup, and only for it.

    Raises:
        ValueError: there is no such scheme, a number is out of its range, mup without a base width, a base width
            without mup, or mup for a model without an attribute `hidden_dim`.
        TypeError: a module has parameters or buffers of its own and no `reset_parameters()`, or a linear layer or a
            table has some besides its weight and bias.

    >>> layer = nn.Linear(4, 4)
    >>> initialise(layer, "gpt2", num_layers=2)
    >>> layer.bias.tolist()
    [0.0, 0.0, 0.0, 0.0]
    """
    check_scheme(scheme, base_width=base_width)
    fill = _FILLS[scheme]
    shrink = 1.0 if base_width is None else math.sqrt(base_width / _width(model))
    crosses = any(name.endswith("cross_attention") for name, _ in model.named_modules())
    decoder = num_decoder_layers
    common: dict[str, Any] = {"std": std, "shrink": shrink, "width": _known_width(model)}
    other = main = _Stack(num_layers, beta=_beta(num_layers, decoder), crosses=crosses and not decoder, **common)
    if decoder:
        other = _Stack(decoder, beta=(12 * decoder) ** -0.25, crosses=crosses, **common)
    with torch.no_grad():
        for name, module, parent in _matrices(model):
            stack = other if name.startswith("decoder.") else main
            for part, role in _parts(name, module, parent):
                fill(part, role, stack)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)
        # From the inside out, so that a module may overwrite the modules inside it.
        for name, module in reversed(list(model.named_modules())):
            # The parameters in a list belong to the module that holds the list.
            listed = isinstance(module, nn.ParameterList | nn.ParameterDict)
            owner = model.get_submodule(name.rpartition(".")[0]) if listed else module
            if _is_matrix(name, module):
                _check_nothing_else(module)
            elif not (listed and hasattr(owner, "reset_parameters")):
                _reset(module, owner, token_std=_VIT_TOKEN_STD if scheme == "vit" else std)


def check_scheme(scheme: str, *, base_width: int | None) -> None:
    """Raise ValueError for mup without a base width, or a base width without mup."""
    if scheme == "mup" and base_width is None:
        raise ValueError("init 'mup' needs base_width, the width at which std and learning rate were tuned")
    if scheme != "mup" and base_width is not None:
        raise ValueError(f"base_width is for init 'mup', got {base_width} with init {scheme!r}; leave it out")


def logit_factor(hidden_dim: int, base_width: int | None) -> float:
    """Return the factor of a model's logits: B / D with mup, else 1. Used by every model.

    Yang et al. 2022, table 8.

    >>> logit_factor(256, base_width=64), logit_factor(256, base_width=None)
    (0.25, 1.0)
    """
    return 1.0 if base_width is None else base_width / hidden_dim


@checked
def parameter_groups(model: nn.Module, learning_rate: Positive, base_width: Size) -> list[dict[str, Any]]:
    """Return parameter groups for Adam with init mup, which scales the learning rate of matrices by B / D.

    Yang et al. 2022, table 8. The given learning rate is for embeddings, heads, patch projections, layers in
    `without_width` (see `initialise`), biases and norms. A tied parameter appears once; a parameter that does not
    require grad is left out. With AdamW the weight decay of the matrices should be larger by D / B, since torch
    multiplies it by the learning rate.

    Args:
        model: any module whose attribute `hidden_dim` is its width D.
        learning_rate: the learning rate tuned at the base width.
        base_width: B, as the model was built with.

    Raises:
        ValueError: a number is out of its range, or the model has no attribute `hidden_dim`.

    >>> model = nn.Sequential(nn.Linear(8, 8))
    >>> model.hidden_dim = 8
    >>> [group["lr"] for group in parameter_groups(model, 0.01, base_width=4)]
    [0.005, 0.01]
    """
    ratio = base_width / _width(model)
    scaled = {
        id(module.weight)
        for name, module, parent in _matrices(model)
        if not any(role in _NOT_SCALED for _, role in _parts(name, module, parent))
    }
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (matrices if id(parameter) in scaled else rest).append(parameter)
    groups = [{"params": matrices, "lr": learning_rate * ratio}, {"params": rest, "lr": learning_rate}]
    return [group for group in groups if group["params"]]


@dataclass(frozen=True)
class _Stack:
    """The properties that a scheme needs: of the model, and of the stack that holds a matrix.

    `shrink` is sqrt(B / D) of mup; `width` is D, None for a model without `hidden_dim`.
    """

    num_layers: int
    _: KW_ONLY
    beta: float
    crosses: bool
    std: float
    shrink: float
    width: int | None

    @property
    def joins(self) -> int:
        return self.num_layers * (3 if self.crosses else 2)


def _beta(num_layers: int, num_decoder_layers: int | None) -> float:
    """Return deepnorm's gain for a single encoder or decoder, or for the encoder of an encoder-decoder."""
    if num_decoder_layers is None:
        return float((8 * num_layers) ** -0.25)
    return float(0.87 * (num_layers**4 * num_decoder_layers) ** -0.0625)


def _gpt2(weight: Tensor, role: str, stack: _Stack) -> None:
    # Note: [mup is gpt2 where D = B] Otherwise mup scales all matrices except those in `_NOT_SCALED`.
    std = stack.std if role in _NOT_SCALED else stack.std * stack.shrink
    nn.init.normal_(weight, std=std / math.sqrt(stack.joins) if role in _INTO_STREAM else std)


def _bert(weight: Tensor, role: str, stack: _Stack) -> None:
    nn.init.normal_(weight, std=stack.std)


def _small(weight: Tensor, role: str, stack: _Stack) -> None:
    if role in _INTO_STREAM:
        nn.init.normal_(weight, std=2 / (stack.num_layers * math.sqrt(weight.shape[0])))
        return
    width = weight.shape[0] if role == "patch" else weight.shape[1]
    if role in _OUTSIDE and stack.width is not None:
        width = stack.width  # a table of biases, [buckets, H], is not as wide as the model
    nn.init.normal_(weight, std=math.sqrt(2 / (5 * width)))


def _deepnorm(weight: Tensor, role: str, stack: _Stack) -> None:
    if role in _OUTSIDE:
        nn.init.normal_(weight, std=stack.std)
    else:
        smaller = role in (*_INTO_STREAM, "value", "feedforward")
        nn.init.xavier_normal_(weight, gain=stack.beta if smaller else 1.0)


def _vit(weight: Tensor, role: str, stack: _Stack) -> None:
    if role == "head":
        nn.init.zeros_(weight)
    elif role == "embedding":
        nn.init.normal_(weight, std=stack.std)
    else:
        bound = math.sqrt(6 / (weight.shape[0] + weight[0].numel()))
        nn.init.uniform_(weight, -bound, bound)


_FILLS: Final[dict[str, Callable[[Tensor, str, _Stack], None]]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "small": _small,
    "deepnorm": _deepnorm,
    "vit": _vit,
    "mup": _gpt2,
}


def _is_matrix(name: str, module: nn.Module) -> bool:
    # Other convolutions have a few weights per channel, and torch's own init suits them.
    return isinstance(module, nn.Linear | nn.Embedding) or (
        isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and _PATCH.search(name) is not None
    )


def _matrices(model: nn.Module) -> Iterator[tuple[str, Any, nn.Module]]:
    """Yield the name, the module and its parent for every module that holds a matrix."""
    for name, module in model.named_modules():
        if _is_matrix(name, module):
            yield name, module, model.get_submodule(name.rpartition(".")[0])


def _parts(name: str, module: Any, parent: nn.Module) -> list[tuple[Tensor, str]]:
    """Return the matrices packed in a weight, with their roles; a patch projection's is [O, C, height, width]."""
    weight, last = module.weight.detach(), name.rpartition(".")[2]
    roles = {
        "embedding": isinstance(module, nn.Embedding),
        "head": last == "head",
        "patch": _PATCH.search(name),
        "without_width": last in getattr(parent, "without_width", ()),
        "out": _OUT.search(name),
        "down": _DOWN.search(name),
        "feedforward": _FEEDFORWARD.search(name),
    }
    for role, fits in roles.items():
        if fits:
            return [(part, role) for part in (weight.chunk(2) if last == "gate_up" else (weight,))]
    packed = _PACKED.get(last, ())
    heads = getattr(parent, "num_heads", 0), getattr(parent, "num_kv_heads", getattr(parent, "num_heads", 0))
    rows = [heads[part != "query"] * getattr(parent, "head_dim", 0) for part in packed]
    if not packed or sum(rows) != weight.shape[0]:
        return [(weight, "other")]
    packed_roles = ["value" if part == "value" else "query_key" for part in packed]
    return list(zip(weight.split(rows), packed_roles, strict=True))


def _reset(module: nn.Module, owner: nn.Module, *, token_std: float) -> None:
    """Fill the parameters and buffers of this module only; errors name the owner."""
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
        return
    for name, parameter in module.named_parameters(recurse=False):
        if name.endswith("_token"):
            nn.init.normal_(parameter, std=token_std)
        elif name == "bias":
            nn.init.zeros_(parameter)
        else:
            raise TypeError(_without_reset("parameter", name, owner))
    for name, _ in module.named_buffers(recurse=False):
        raise TypeError(_without_reset("buffer", name, owner))


def _without_reset(kind: str, name: str, owner: nn.Module) -> str:
    return (
        f"the init scheme cannot fill the {kind} {name!r} of {type(owner).__name__}; give the class a "
        "reset_parameters() that fills it"
    )


def _check_nothing_else(matrix: nn.Module) -> None:
    for name, _ in (*matrix.named_parameters(recurse=False), *matrix.named_buffers(recurse=False)):
        if name not in ("weight", "bias"):
            raise TypeError(
                f"the init scheme fills only weight and bias of {type(matrix).__name__}, not {name!r}; move it into a "
                "submodule with a reset_parameters()"
            )


def _known_width(model: nn.Module) -> int | None:
    width = getattr(model, "hidden_dim", None)
    return width if isinstance(width, int) else None


def _width(model: nn.Module) -> int:
    width = _known_width(model)
    if width is None:
        raise ValueError(f"init 'mup' needs the model's width, but {type(model).__name__} has no hidden_dim; set it")
    return width
