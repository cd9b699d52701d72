"""Every cluster that has a price, sorted by the money of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import Literal

from zsim.engine.simulator import Simulator
from zsim.errors import InputError, ZsimError
from zsim.specs.presets import server_of_gpu, topology_preset_names
from zsim.specs.prices import PriceList
from zsim.study.rent.offer import Offer
from zsim.study.rent.question import RentQuestion
from zsim.study.rent.search import ClusterQuestion, ClusterSearch
from zsim.study.tune.evaluate import Evaluator

# A cluster on which a run costs so many times the cheapest by a lower bound is not looked at any closer: the
# ranges of 80 % of two offers overlap where one costs up to about 1.4 times the other, and steps take up to
# a quarter longer than their bounds.
_DEARER = 1.25

_Stage = Literal["kernels", "plans", "simulation"]


@dataclass(frozen=True)
class Rents:
    """The outcome on all clusters."""

    question: RentQuestion
    model: str
    sequence_length: int
    prices: PriceList
    searches: Sequence[ClusterSearch]
    without_price: Sequence[str]
    """The presets that were not looked at, since nobody says what they cost."""
    num_checked: int
    """Configurations whose memory was computed."""
    num_simulated: int

    @property
    def offers(self) -> list[Offer]:
        """The offers in time and within the money, the cheapest first, those without a price last."""
        offers = [search.offer for search in self.searches if search.offer and search.is_in_time]
        affordable = [offer for offer in offers if not self._is_dear(offer)]
        return sorted(affordable, key=lambda offer: (offer.money is None, offer.outlay, offer.cluster))

    @property
    def dear(self) -> list[Offer]:
        """The offers in time that cost more than the limit."""
        offers = [search.offer for search in self.searches if search.offer and search.is_in_time]
        return [offer for offer in offers if self._is_dear(offer)]

    @property
    def late(self) -> list[ClusterSearch]:
        """The clusters on which it fits but does not finish in time."""
        return [search for search in self.searches if search.offer and not search.is_in_time]

    @property
    def refused(self) -> list[ClusterSearch]:
        """The clusters on which nothing fits, or that cannot run it."""
        return [search for search in self.searches if search.offer is None and search.least_outlay is None]

    @property
    def dearer(self) -> list[ClusterSearch]:
        """The clusters that were not simulated, since a run costs much more there, the cheapest first."""
        skipped = [search for search in self.searches if search.least_outlay is not None]
        return sorted(skipped, key=lambda search: search.least_outlay or 0.0)

    def _is_dear(self, offer: Offer) -> bool:
        limit = self.question.max_money
        return limit is not None and offer.money is not None and offer.money > limit

    def tokens(self) -> float:
        """Tokens of the run."""
        tokens = self.question.length.run_tokens(self.sequence_length)
        assert tokens is not None, "a question has a length"
        return tokens


def search_rents(
    question: RentQuestion,
    prices: PriceList,
    clusters: Sequence[str] = (),
    *,
    jobs: int = 1,
    on_done: Callable[[str, int], None] | None = None,
) -> Rents:
    """Search each of the clusters, or by default the presets with a price that may be among the cheapest.
    `jobs` is the number of processes, on which the result does not depend.

    Raises InputError where a cluster is unknown, and where no cluster can run the training at all.
    """
    clusters = [server_of_gpu(name) or name for name in clusters]
    names = list(clusters) or [name for name in topology_preset_names() if name in prices.cluster]
    names += [] if clusters else [name for name in prices.cluster if name not in names]
    left_out = () if clusters else [name for name in topology_preset_names() if name not in names]
    if not names:
        raise InputError("rent: no cluster has a price; expected --price CLUSTER=PRICE or --cluster NAME")
    # Plans hold no hardware, so that clusters share them.
    evaluator = Evaluator(jobs, on_done=on_done, simulator=Simulator())
    start = question.base(names[0], question.model_ranks, question.kinds[0], evaluator.simulator).job
    by_name = search_clusters(question, prices, names, evaluator, inf if clusters else _DEARER)
    searches = [by_name[name] for name in names]
    if all(search.offer is None and not search.counts for search in searches):
        raise InputError(f"rent: {searches[0].cluster}: {searches[0].reason}")
    return Rents(
        question, start.model.name, start.training.sequence_length, prices, searches, left_out,
        evaluator.num_checked, evaluator.num_simulated,
    )  # fmt: skip


def search_clusters(
    question: RentQuestion, prices: PriceList, names: Sequence[str], evaluator: Evaluator, dearer: float
) -> dict[str, ClusterSearch]:
    """The outcome on each cluster, best first: the cluster that may be the cheapest by what is known of it is
    looked at more closely, until no other can cost less than `dearer` times the cheapest.
    """
    searches: dict[str, ClusterSearch] = {}
    queue: list[tuple[float, int, _Stage]] = []
    questions: dict[int, ClusterQuestion] = {}

    def look(number: int, stage: _Stage) -> None:
        name = names[number]
        try:
            if stage == "kernels":
                price = prices.cluster.get(name)
                questions[number] = ClusterQuestion(question, name, price, prices.currency, evaluator)
                heappush(queue, (questions[number].kernel_outlay(), number, "plans"))
            elif stage == "plans":
                heappush(queue, (questions[number].plan_outlay(), number, "simulation"))
            else:
                searches[name] = questions[number].simulate()
        except ZsimError as error:
            searches[name] = ClusterSearch(name, None, False, (), str(error))

    for number in range(len(names)):
        look(number, "kernels")
    cheapest = inf
    while queue:
        outlay, number, stage = heappop(queue)
        if outlay < inf and outlay > cheapest * dearer:
            searches[names[number]] = questions[number].skip(outlay)
            continue
        look(number, stage)
        search = searches.get(names[number])
        if search is not None and search.offer is not None and search.is_in_time:
            cheapest = min(cheapest, search.offer.outlay)
    return searches
