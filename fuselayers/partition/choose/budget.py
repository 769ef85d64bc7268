"""saved_by_budget -- the fastest set of values to save that fits into so many bytes, or under a peak.

The price of memory is raised until the minimum cut fits (Everett, "Generalized Lagrange multiplier method for solving
problems of optimum allocation of resources", 1963). Between two neighbouring prices whole layers change at once, so the
cut leaves a part of the budget unused.

If recomputing elementwise ops frees enough memory, time is minimised: the price is raised for the first part of the
graph only. If matmuls have to be recomputed too, their FLOPs are minimised first: the unused part saves matmuls, chosen
as a knapsack problem.
"""

import math
from collections.abc import Callable
from typing import Final

import torch.fx as fx

from ..cut import split
from ..joint_graph import JointGraph, PartitionError
from .cost import CostModel, NodePrice, flops_of
from .flow import SOURCE
from .knapsack import knapsack
from .min_cut import PricedEdge, priced_edges, saved_by_edges, saved_by_min_cut
from .peak_bytes import peak_bytes

_HIGHEST_PRICE: Final = 1e9
_PRICE_STEPS: Final = 10
_PEAK_STEPS: Final = 16
# The weight of a byte moved when a matmul's FLOPs come first.
_MOVED_BESIDE_FLOPS: Final = 1e-3


def saved_by_budget(joint: JointGraph, *, cost: CostModel, limit: float) -> list[fx.Node]:
    """Return the values to save, in the order of the graph, so that they take at most `limit` bytes.

    If the cut at the cost model's own memory price fits, it is returned.

    Raises:
        PartitionError: no cut fits `limit` (the message names the bytes of the smallest cut found), or a value can
            neither be saved nor recomputed.
    """
    saved = saved_by_min_cut(joint, cost=cost)
    if joint.saved_bytes(saved) <= limit:
        return saved
    cut = _PricedCut(joint, cost)
    smallest = cut.saved_at(_HIGHEST_PRICE, flops_first=True)
    if joint.saved_bytes(smallest) > limit:
        raise PartitionError(
            f"this graph needs more than {limit:,.0f} bytes saved for backward: the smallest cut "
            f"found saves {joint.saved_bytes(smallest):,}; give a larger budget, or fuse a smaller part of the model"
        )
    matmuls = frozenset(cut.flops)
    if joint.saved_bytes(cut.saved_at(_HIGHEST_PRICE, run_once=matmuls)) <= limit:
        return _without_matmuls(cut, matmuls, limit)
    return _with_matmuls(cut, limit)


def split_by_budget(joint: JointGraph, *, cost: CostModel, limit: float) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return a forward and backward that save the values of `saved_by_budget`, with the lowest peak found.

    If fewer values are saved, more recomputed values wait for their gradients at once, so a smaller budget can have a
    higher peak. Then backward first recomputes the values that a larger budget saves, see `cut.split`. The
    larger budgets tried are 2, 4, 8, ... times the limit, until one has a higher peak than the best so far.

    Raises:
        PartitionError: as `saved_by_budget`.
    """

    def peak(parts: tuple[fx.GraphModule, fx.GraphModule]) -> int:
        return peak_bytes(*parts, num_forward_outputs=joint.num_forward_outputs)

    saved = saved_by_budget(joint, cost=cost, limit=limit)
    best = split(joint, saved)
    most = joint.saved_bytes(saved_by_min_cut(joint, cost=cost))
    while (limit := 2 * limit) < most:
        kept = saved_by_budget(joint, cost=cost, limit=limit)
        if peak(split(joint, kept)) > peak(best):
            break
        best = min(best, split(joint, saved, kept=kept), key=peak)
    return best


def limit_for_peak(joint: JointGraph, *, cost: CostModel, peak: int) -> int:
    """Return the largest budget tried whose `split_by_budget` holds at most `peak` bytes at once.

    The budgets tried are the same for every `peak`: from the bytes of the minimum cut down to those of the smallest
    cut. The first that fits is returned. So asking for a lower `peak` never gives a higher one, although a smaller
    budget may have a higher peak.

    Raises:
        PartitionError: no budget fits; the message names the lowest peak.
    """
    most = joint.saved_bytes(saved_by_min_cut(joint, cost=cost))
    least = smallest_saved_bytes(joint, cost=cost)
    lowest = math.inf
    for step in range(_PEAK_STEPS + 1):
        limit = math.ceil(least + (most - least) * (1 - step / _PEAK_STEPS) ** 2)  # finer where less is saved
        parts = split_by_budget(joint, cost=cost, limit=limit)
        of_parts = peak_bytes(*parts, num_forward_outputs=joint.num_forward_outputs)
        if of_parts <= peak:
            return limit
        lowest = min(lowest, of_parts)
    raise PartitionError(
        f"forward and backward of this graph need more than {peak:,} bytes at once: the lowest peak found is "
        f"{lowest:,.0f}; give a larger peak, or fuse a smaller part of the model"
    )


class _PricedCut:
    """The cuts of a graph at different prices of memory."""

    def __init__(self, joint: JointGraph, cost: CostModel) -> None:
        self.joint = joint
        self.lowest_price = cost.memory_price
        self.flops = {node: flops for node in joint.needed if (flops := flops_of(node)) > 0}
        self._edges = priced_edges(joint, cost=cost)

    def saved_at(
        self,
        price: float | Callable[[fx.Node], float],
        *,
        run_once: frozenset[fx.Node] = frozenset(),
        flops_first: bool = False,
    ) -> list[fx.Node]:
        """Return the cheapest cut at a price in bytes moved per saved byte, the same for all values or one for each.

        Ops in `run_once` are not recomputed. With `flops_first`, memory traffic counts little beside a matmul's FLOPs.
        """
        weight = _MOVED_BESIDE_FLOPS if flops_first else 1.0

        def capacity(edge: PricedEdge, parts: NodePrice) -> float:
            assert edge.node is not None
            if edge.start == SOURCE and edge.node in run_once:
                return math.inf
            at = price(edge.node) if callable(price) else price
            return parts.reluctance * (weight * parts.moved + parts.arithmetic) + at * parts.saved

        return saved_by_edges(self.joint, self._edges, capacity)

    def lowest_fitting(self, low: float, limit: float, **options: object) -> tuple[float, float, list[fx.Node]]:
        """Return a price at which the cut does not fit, one just above at which it fits, and the cut that fits."""
        high = max(4.0 * low, 4.0)
        while not self.fits(saved := self.saved_at(high, **options), limit):  # type: ignore[arg-type]
            low, high = high, 16.0 * high
        for _ in range(_PRICE_STEPS):
            middle = math.sqrt(max(low, 1e-3) * high)
            if self.fits(attempt := self.saved_at(middle, **options), limit):  # type: ignore[arg-type]
                high, saved = middle, attempt
            else:
                low = middle
            if high < 1.02 * low:
                break
        return low, high, saved

    def recomputed_matmuls(self, saved: list[fx.Node]) -> list[fx.Node]:
        return [node for node in self.joint.recomputed(saved) if node in self.flops]

    def recomputed_flops(self, saved: list[fx.Node]) -> float:
        return sum(self.flops[node] for node in self.recomputed_matmuls(saved))

    def fits(self, saved: list[fx.Node], limit: float) -> bool:
        return self.joint.saved_bytes(saved) <= limit


def _without_matmuls(cut: _PricedCut, matmuls: frozenset[fx.Node], limit: float) -> list[fx.Node]:
    """Recompute no matmul: the higher price applies to as few values as possible, from the start of the graph."""
    low, high, saved = cut.lowest_fitting(cut.lowest_price, limit, run_once=matmuls)
    first, last = 0, len(cut.joint.needed)
    while last - first > 1:
        middle = (first + last) // 2
        prices = dict.fromkeys(cut.joint.needed, low) | dict.fromkeys(cut.joint.needed[:middle], high)
        attempt = cut.saved_at(prices.__getitem__, run_once=matmuls)
        if cut.fits(attempt, limit):
            last, saved = middle, attempt
        else:
            first = middle
    return saved


def _with_matmuls(cut: _PricedCut, limit: float) -> list[fx.Node]:
    """Recompute some matmuls, with as few FLOPs as possible."""
    _, high, saved = cut.lowest_fitting(cut.lowest_price, limit, flops_first=True)
    # A smaller cut than needed leaves the knapsack more to choose from.
    starts = [saved] + [cut.saved_at(price, flops_first=True) for price in (2.0 * high, _HIGHEST_PRICE)]
    return min((_filled(cut, start, limit) for start in starts), key=cut.recomputed_flops)


def _filled(cut: _PricedCut, saved: list[fx.Node], limit: float) -> list[fx.Node]:
    """Spend the rest of the budget on saving matmuls, so that they are not recomputed."""
    run_once: frozenset[fx.Node] = frozenset()
    while True:
        free = int(limit) - cut.joint.saved_bytes(saved)
        matmuls = [node for node in cut.recomputed_matmuls(saved) if node not in run_once]
        sizes = [cut.joint.saved_bytes([node]) for node in matmuls]
        chosen = knapsack(sizes, [cut.flops[node] for node in matmuls], free)
        if not chosen:
            return saved
        run_once |= {matmuls[index] for index in chosen}
        # The knapsack counts the matmuls' results; saving something smaller may be enough.
        attempt = cut.saved_at(
            _HIGHEST_PRICE, run_once=run_once | cut.flops.keys() - set(cut.recomputed_matmuls(saved)), flops_first=True
        )
        if not cut.fits(attempt, limit):
            return saved
        saved = attempt


def smallest_saved_bytes(joint: JointGraph, *, cost: CostModel) -> int:
    """Return the bytes of the smallest cut found, which recomputes every op that may run twice.

    If two views of one storage are saved, the cut counts it twice, so a smaller one may exist.
    """
    return joint.saved_bytes(_PricedCut(joint, cost).saved_at(_HIGHEST_PRICE, flops_first=True))
