"""Every cluster that has a price, sorted by the money of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from zsim.engine.simulator import Simulator
from zsim.errors import InputError, ZsimError
from zsim.specs.presets import topology_preset_names
from zsim.specs.prices import PriceList
from zsim.study.rent.offer import Offer
from zsim.study.rent.question import RentQuestion
from zsim.study.rent.search import ClusterSearch, search_cluster
from zsim.study.tune.evaluate import Evaluator


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
        return [search for search in self.searches if search.offer is None]

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
    """Search each of the clusters, or by default every preset that has a price. `jobs` is the number of
    processes, on which the result does not depend.

    Raises InputError where a cluster is unknown, and where no cluster can run the training at all.
    """
    names = list(clusters) or [name for name in topology_preset_names() if name in prices.cluster]
    names += [] if clusters else [name for name in prices.cluster if name not in names]
    left_out = () if clusters else [name for name in topology_preset_names() if name not in names]
    if not names:
        raise InputError("rent: no cluster has a price; expected --price CLUSTER=PRICE or --cluster NAME")
    start = _model_of(question, names[0])
    chunks = [names[first::jobs] for first in range(min(jobs, len(names)))]
    if len(chunks) == 1:
        results = [_search_clusters(question, prices, chunks[0], on_done)]
    else:
        import joblib

        run: Any = joblib.Parallel(n_jobs=len(chunks))
        results = run(joblib.delayed(_search_clusters)(question, prices, chunk) for chunk in chunks)
    by_name = {search.cluster: search for searches, _, _ in results for search in searches}
    searches = [by_name[name] for name in names]
    if all(search.offer is None and not search.counts for search in searches):
        raise InputError(f"rent: {searches[0].cluster}: {searches[0].reason}")
    checked, simulated = sum(result[1] for result in results), sum(result[2] for result in results)
    return Rents(question, *start, prices, searches, left_out, checked, simulated)


def _model_of(question: RentQuestion, cluster: str) -> tuple[str, int]:
    """(the model's name, tokens of a sequence)."""
    job = question.base(cluster, question.model_ranks, question.kinds[0]).job
    return job.model.name, job.training.sequence_length


def _search_clusters(
    question: RentQuestion,
    prices: PriceList,
    names: Sequence[str],
    on_done: Callable[[str, int], None] | None = None,
) -> tuple[list[ClusterSearch], int, int]:
    """(the outcome on each cluster, configurations checked, configurations simulated). Plans hold no
    hardware, so that clusters share them.
    """
    evaluator = Evaluator(on_done=on_done, simulator=Simulator())
    searches = []
    for name in names:
        try:
            search = search_cluster(question, name, prices.cluster.get(name), prices.currency, evaluator)
        except ZsimError as error:
            search = ClusterSearch(name, None, False, (), str(error))
        searches.append(search)
    return searches, evaluator.num_checked, evaluator.num_simulated
