"""mixture_of_experts -- many feedforwards; a router sends each token to a few of them.

    x, y     [..., D]    D model
    tokens   [N, D]      N tokens: all dimensions but the last, flattened
    real     [N]         True for a real token, False for padding
    logits   [N, E]      E experts; logits = tokens W^T, W the router's weight
    chosen   [N, K]      K top_k: the experts of each token, the likeliest first
    weights  [N, K]      the factors of their results
    slots    [E, C]      C capacity: the tokens of each expert

    y[n] = sum over k of weights[n, k] * expert chosen[n, k] (x[n]) + sum over the shared experts of shared(x[n])

Shazeer et al., "Outrageously large neural networks", 2017; Lepikhin et al., "GShard", 2020; Fedus et al., "Switch
transformers", 2021; Zoph et al., "ST-MoE", 2022; Zhou et al., "Mixture-of-experts with expert choice routing", 2022;
Jiang et al., "Mixtral of experts", 2024; Dai et al., "DeepSeekMoE", 2024, section 3.2 (shared experts).

The router has no noise (Switch multiplies its input by random numbers): in this library only dropout's masks draw
random numbers by position.
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._torch.dispatch import is_compiling, transforms_are_active
from ..._torch.modules import is_plain
from ...ops.grouped_linear import grouped_linear
from ...ops.implementations import without_autocast
from ..checks import check_input, check_last_dim
from ..linear import Linear
from ..option import Component, Count, NotNegative, Positive, Probability, Size, accepted, checked, create
from ..plain import is_plain_linear
from ..registry import Choice, as_choice, register
from .gated_mlp import GatedMLP
from .mlp import MLP, FusedMLP

Gating = Literal["top_k", "expert_choice"]
Number = TypeVar("Number", int, Tensor)
_KNOWN: Final = (MLP, FusedMLP, GatedMLP)


@register("feedforward", "mixture_of_experts")
class MixtureOfExperts(nn.Module):
    """A router and its experts, each of them a feedforward.

    Note: [how tokens reach their experts]
    All sizes are fixed. Without a capacity no token is dropped: tokens are sorted by expert, and a grouped matmul
    applies each expert to its own tokens (see ops/grouped_linear.py). With a capacity every expert has C slots. An
    empty slot computes some other token, and its result is not used.

    All experts run at once if they are classes of this library with the same options and unmodified linear layers.
    Otherwise they run one by one, for example with an adapter, a hook, an activation with weights, a user's class, or
    inside `torch.vmap`. Without a capacity each expert then has a slot for every token, which is E / K times the work.

    Padding takes no slot, does not count in the losses and does not affect real tokens. Its result is zero except for
    the shared experts. A block passes the key_padding_mask on.

    In training, forward sets `auxiliary_loss`, a float32 scalar that models add to their loss; in eval mode it sets
    None.

    Args:
        hidden_dim: D, the width of the model.
        num_experts: E, the number of experts that the router chooses from.
        top_k: K, the number of experts of each token; with expert_choice the average number.
        gating: "top_k": each token takes its K likeliest experts. "expert_choice": each expert takes the C tokens with
            the highest softmax, so that a token may have any number of experts; it compares all tokens of a call, so it
            is not causal (Zhou et al. 2022, section 3.2). Ties go to the first expert or token.
        expert: the feedforward that serves as each expert, with its options; it must not mix tokens.
        dropout: probability of dropping a hidden value of an expert in training, 0 <= dropout <= 1. A dropout above 0
            among the expert's own options takes precedence.
        capacity_factor: capacity of an expert, as a multiple of its even share: C = ceil(capacity_factor * K * N / E)
            tokens, at most N, in training and in eval; N is the number of real tokens of the call. So a longer call may
            keep an early token that a shorter one drops, and generation differs a little from training. An expert takes
            its tokens in their order, row after row, and drops those beyond C: their term is zero. The order does not
            depend on the weights, since a later token could then displace an earlier one. None drops no token; with
            expert_choice None means 1.
        normalise_weights: whether the softmax is over the K experts of a token, with the sum 1 (Mixtral), or over all
            experts (Switch). If it is over one expert (top_k 1), all weights are 1, and the router does not learn from
            y. With expert_choice the softmax is always over all experts.
        balance_coefficient: weight of the load-balancing loss, E * sum over e of share[e] * mean[e]: share is the
            fraction of the N tokens that chose an expert (dropped or not), mean is the mean of its softmax. Its minimum
            is K (Fedus et al. 2021, eq. 4; K above one as in Mixtral). With expert_choice it is 0.
        z_coefficient: weight of the loss for small logits, the mean of logsumexp(logits)^2, in nats^2 (Zoph et al.
            2022, eq. 5).
        shared_experts: number of additional experts that every token takes, with the weight 1.
        causal: whether the model is causal, so that no token may depend on later ones.
        backend: of fused layers in the experts: "auto" calls their ops, a name runs them through `fuse`.
        partition: how `fuse` chooses the values saved for backward; the backend "auto" does not use it.

    Raises:
        ValueError: a number out of its range, top_k above num_experts, an unknown gating, expert_choice in a causal
            model, an expert that mixes tokens or takes no dropout, or (in forward) x or the mask has another shape.

    >>> layer = MixtureOfExperts(8, num_experts=4, expert=Choice("gated_mlp", {"width": 16}))
    >>> layer(torch.ones(2, 3, 8)).shape, layer.auxiliary_loss.dtype
    (torch.Size([2, 3, 8]), torch.float32)
    """

    built_in: ClassVar[frozenset[str]] = frozenset({"causal", "backend", "partition"})
    takes_padding: ClassVar[bool] = True

    @checked
    def __init__(
        self,
        hidden_dim: Size,
        *,
        num_experts: Size = 8,
        top_k: Size = 2,
        gating: Gating = "top_k",
        expert: Annotated[Choice | str, Component("feedforward")] = "mlp",
        dropout: Probability = 0.0,
        capacity_factor: Positive | None = None,
        normalise_weights: bool = True,
        balance_coefficient: NotNegative = 0.01,
        z_coefficient: NotNegative = 0.0,
        shared_experts: Count = 0,
        causal: bool = False,
        backend: str = "auto",
        partition: str = "min_cut",
    ) -> None:
        super().__init__()
        if top_k > num_experts:
            raise ValueError(f"top_k must be at most num_experts, {num_experts}, got {top_k}")
        if gating == "expert_choice" and causal:
            raise ValueError(
                "gating 'expert_choice' lets a later token displace an earlier token, which a causal model must not; "
                "use gating='top_k'"
            )
        self.hidden_dim = hidden_dim
        self.top_k = top_k
        self.gating: Gating = gating
        self.capacity_factor = capacity_factor
        self.room = _slots_per_token(1 if capacity_factor is None else capacity_factor, Fraction(top_k, num_experts))
        self.normalise_weights = normalise_weights
        self.balance_coefficient = balance_coefficient
        self.z_coefficient = z_coefficient
        # A result depends on the other tokens where they compete for slots.
        self.mixes_tokens = gating == "expert_choice" or capacity_factor is not None
        self.auxiliary_loss: Tensor | None = None
        offered = accepted("feedforward", expert, causal=causal, backend=backend, partition=partition)
        expert = as_choice(expert)
        if dropout:
            expert = Choice(expert.name, {**expert.options, "dropout": expert.options.get("dropout") or dropout})

        def build(count: int) -> nn.ModuleList:
            return nn.ModuleList(create("feedforward", expert, hidden_dim, **offered) for _ in range(count))

        self.router = Linear(hidden_dim, num_experts, bias=False)
        self.experts = build(num_experts)
        self.shared = build(shared_experts)
        if getattr(self.experts[0], "mixes_tokens", False):
            raise ValueError(
                f"expert {expert.name!r} mixes tokens, but an expert gets its tokens without their neighbours; use an "
                "expert that treats each token alone, such as 'mlp'"
            )

    def forward(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """[..., D] -> [..., D].

        Args:
            x: [..., D], and with a mask [B, T, D].
            key_padding_mask: bool [B, T], True for a real token, False for padding; None if all are real.
        """
        if key_padding_mask is None:
            check_last_dim(x, self.hidden_dim)
        else:
            check_input(x, self.hidden_dim, key_padding_mask)
        real_N = None if key_padding_mask is None else key_padding_mask.flatten()
        x_ND = x.reshape(-1, self.hidden_dim)
        logits_NE = self._logits(x_ND)
        if self.gating == "expert_choice":
            self.auxiliary_loss = self._loss(logits_NE, real_N, None)
            y_ND = self._by_experts_choice(x_ND, real_N, logits_NE.softmax(-1))
        else:
            # A stable sort, because topk does not define which of equal values it takes.
            chosen_NK = logits_NE.detach().sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
            order_A, sizes_E = _sorted_by_expert(chosen_NK, real_N, len(self.experts))
            self.auxiliary_loss = self._loss(logits_NE, real_N, sizes_E)
            if self.normalise_weights:
                weights_NK = logits_NE.gather(1, chosen_NK).softmax(-1)
            else:
                weights_NK = logits_NE.softmax(-1).gather(1, chosen_NK)
            if self.capacity_factor is None and _run_as_one(self.experts):
                y_NKD = self._all_in_runs(x_ND, real_N, order_A, sizes_E)
            else:
                y_NKD = self._in_slots(x_ND, real_N, chosen_NK, order_A, sizes_E)
            # Summed in the dtype of the weights, float32 or wider.
            y_ND = (y_NKD * weights_NK[..., None]).sum(1).to(y_NKD.dtype)
        for expert in self.shared:
            y_ND = y_ND + expert(x_ND)
        return y_ND.view(x.shape)

    def _logits(self, x_ND: Tensor) -> Tensor:
        """Return the router's logits, in float32 at least: [N, D] -> [N, E]."""
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        if not is_plain_linear(self.router):  # an adapter chooses its dtypes
            logits_NE: Tensor = self.router(x_ND)
            return logits_NE.to(wide)
        # Logits in bfloat16 would choose other experts.
        with without_autocast(x_ND):
            return F.linear(x_ND.to(wide), self.router.weight.to(wide))

    def _loss(self, logits_NE: Tensor, real_N: Tensor | None, sizes_E: Tensor | None) -> Tensor | None:
        if not self.training:
            return None
        num_tokens, num_experts = logits_NE.shape
        if not num_tokens:
            return logits_NE.sum().float()  # zero, with a gradient of zeros
        loss = logits_NE.new_zeros((), dtype=torch.float32)
        if sizes_E is not None:
            share_E = sizes_E.to(logits_NE.dtype) / _count(logits_NE, real_N)
            balance = num_experts * (share_E * _mean(logits_NE.softmax(-1), real_N)).sum()
            loss = loss + self.balance_coefficient * balance
        return (loss + self.z_coefficient * _mean(logits_NE.logsumexp(-1).square(), real_N)).float()

    def _capacity(self, num_tokens: Number) -> Number:
        places, tokens = self.room
        return -(-num_tokens * places // tokens)

    def _all_in_runs(self, x_ND: Tensor, real_N: Tensor | None, order_A: Tensor, sizes_E: Tensor) -> Tensor:
        """Return the unweighted results of each token's experts: [N, K, D]; zeros for padding."""
        y_AD = _as_one(self.experts, x_ND[order_A // self.top_k], sizes_E.cumsum(0))
        # Gathered by the inverse order; a scattered sum would add in an undefined order on a GPU.
        y_NKD: Tensor = y_AD[_inverse(order_A)].unflatten(0, (-1, self.top_k))  # type: ignore[no-untyped-call]
        return y_NKD if real_N is None else y_NKD.masked_fill(~real_N[:, None, None], 0.0)

    def _in_slots(
        self, x_ND: Tensor, real_N: Tensor | None, chosen_NK: Tensor, order_A: Tensor, sizes_E: Tensor
    ) -> Tensor:
        """As `_all_in_runs`, with zeros for dropped tokens."""
        capacity = len(x_ND) if self.capacity_factor is None else self._capacity(len(x_ND))
        first_E = sizes_E.cumsum(0) - sizes_E
        # The assignment of each slot. A slot past an expert's last token holds an assignment of the next expert, which
        # is not used.
        slots_EC = first_E[:, None] + torch.arange(capacity, device=order_A.device)
        slots_EC = order_A[slots_EC.clamp(max=chosen_NK.numel() - 1)]
        y_ECD = _run_slots(self.experts, x_ND[slots_EC // self.top_k])
        rank_NK = _inverse(order_A).view_as(chosen_NK) - first_E[chosen_NK]
        y_NKD = y_ECD[chosen_NK, rank_NK.clamp(max=capacity - 1)]
        if real_N is None:
            dropped_NK = rank_NK >= capacity
        else:
            most = capacity if self.capacity_factor is None else self._capacity(real_N.sum())
            dropped_NK = (rank_NK >= most) | ~real_N[:, None]
        # Filled, not multiplied by zero, which would turn an infinite result of another token into NaN.
        return y_NKD.masked_fill(dropped_NK[..., None], 0.0)

    def _by_experts_choice(self, x_ND: Tensor, real_N: Tensor | None, probabilities_NE: Tensor) -> Tensor:
        capacity = self._capacity(len(x_ND))
        wanted_NE = probabilities_NE.detach()
        if real_N is not None:
            wanted_NE = wanted_NE.masked_fill(~real_N[:, None], -1.0)  # after all real tokens
        # Contiguous: for other strides, tracing expects results that differ from those of the sort.
        order_EN = wanted_NE.T.contiguous().sort(dim=-1, descending=True, stable=True).indices
        slots_EC = order_EN[:, :capacity]
        y_ECD = _run_slots(self.experts, x_ND[slots_EC])
        weighted_ECD = y_ECD * probabilities_NE.T.gather(1, slots_EC)[..., None]
        if real_N is not None:
            unused_C = torch.arange(capacity, device=x_ND.device) >= self._capacity(real_N.sum())
            weighted_ECD = weighted_ECD.masked_fill(unused_C[:, None], 0.0)
        zeros_ND = weighted_ECD.new_zeros(len(x_ND), y_ECD.shape[-1])
        y_ND = zeros_ND.index_add(0, slots_EC.flatten(), weighted_ECD.flatten(0, 1))
        return y_ND.to(y_ECD.dtype)

    def extra_repr(self) -> str:
        return (
            f"top_k={self.top_k}, gating={self.gating!r}, capacity_factor={self.capacity_factor}, "
            f"normalise_weights={self.normalise_weights}, balance_coefficient={self.balance_coefficient}, "
            f"z_coefficient={self.z_coefficient}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # The last loss holds the graph of a step, which cannot be copied or pickled.
        return {**self.__dict__, "auxiliary_loss": None}


def _slots_per_token(capacity_factor: float, share: Fraction) -> tuple[int, int]:
    """Return an expert's slots per token as a numerator and a denominator; `share` is its even share of the tokens."""
    # An exact decimal fraction: 1.1 * 2 * 50 / 2 is 55, but in binary slightly more, which would give 56 slots. The
    # denominator is limited, so that a product with a number of tokens fits int64: with padding C is a tensor.
    room = min(Fraction(1), Fraction(str(capacity_factor)) * share).limit_denominator(2**31)
    return max(room, Fraction(1, 2**31)).as_integer_ratio()  # at least one slot


def _count(x_ND: Tensor, real_N: Tensor | None) -> Tensor | int:
    """Return the number of real tokens, at least one, as a divisor."""
    return len(x_ND) if real_N is None else real_N.sum().clamp(min=1)


def _mean(x_N: Tensor, real_N: Tensor | None) -> Tensor:
    """Return the mean over the real tokens: [N] -> [] and [N, E] -> [E]."""
    if real_N is not None:
        x_N = x_N.masked_fill(~(real_N if x_N.dim() == 1 else real_N[:, None]), 0.0)
    return x_N.sum(0) / _count(x_N, real_N)


def _sorted_by_expert(chosen_NK: Tensor, real_N: Tensor | None, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the assignments, sorted by expert and then by token, and their number for each expert: [N * K], [E].

    Assignments of padding are last, and count for no expert.
    """
    if real_N is not None:
        chosen_NK = chosen_NK.masked_fill(~real_N[:, None], num_experts)
    chosen_A = chosen_NK.flatten()
    sizes = chosen_A.new_zeros(num_experts + 1).scatter_add(0, chosen_A, torch.ones_like(chosen_A))
    return chosen_A.argsort(stable=True), sizes[:num_experts]


def _inverse(order_A: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    return torch.empty_like(order_A).scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))


def _run_as_one(experts: nn.ModuleList) -> bool:
    """Return whether `_as_one` gives the same result as calling each expert."""
    if transforms_are_active() and not is_compiling():  # the grouped matmul has no rule for vmap
        return False
    first: Any = experts[0]
    if type(first) not in _KNOWN or (first.custom_activation is not None and [*first.custom_activation.parameters()]):
        return False
    options = [(type(expert), expert.activation, expert.dropout, expert.training) for expert in experts]
    if any(other != options[0] for other in options) or not all(map(is_plain, experts)):
        return False
    return all(is_plain_linear(getattr(expert, name)) for expert in experts for name in first.linears)


def _as_one(experts: nn.ModuleList, x_RD: Tensor, ends_E: Tensor) -> Tensor:
    """Apply each expert to its rows: [R, D] -> [R, D]. Rows past the last end are undefined."""
    first: Any = experts[0]

    def layer(name: str) -> Callable[[Tensor], Tensor]:
        layers: list[Any] = [getattr(expert, name) for expert in experts]

        def call(z_RX: Tensor) -> Tensor:
            y_RX = grouped_linear(z_RX, [layer.weight for layer in layers], ends_E)
            if layers[0].bias is None:
                return y_RX
            # An embedding, because its backward adds in a defined order.
            bias_EX = torch.stack([layer.bias.to(y_RX.dtype) for layer in layers])
            expert_R = torch.searchsorted(ends_E, torch.arange(len(y_RX), device=y_RX.device), right=True)
            return y_RX + F.embedding(expert_R.clamp(max=len(layers) - 1), bias_EX)

        return call

    y_RD: Tensor = first.through(x_RD, *map(layer, first.linears))
    return y_RD


def _run_slots(experts: nn.ModuleList, x_ECD: Tensor) -> Tensor:
    if _run_as_one(experts):
        ends_E = torch.arange(1, len(experts) + 1, device=x_ECD.device) * x_ECD.shape[1]
        return _as_one(experts, x_ECD.flatten(0, 1), ends_E).view(x_ECD.shape)
    return torch.stack([expert(x_CD) for expert, x_CD in zip(experts, x_ECD.unbind(), strict=True)])
