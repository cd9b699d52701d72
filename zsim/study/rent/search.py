"""A coarse search on one cluster: how many of its GPUs, and the configuration to run on them.

On each number of GPUs the configurations are planned in the order in which they cost time: recomputing more
comes before a loss without all logits, which comes before offloading. The first one that fits safely is
taken, or else the first that likely fits. Where its plan waits for traffic, larger micro-batches are planned
too, which need it less often. Numbers of GPUs grow by factors of two from the least that could finish in
time, until more would cost more. Of these plans the two cheapest by their lower bounds are simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from zsim.engine.simulator import Simulator
from zsim.errors import InputError
from zsim.report.energy import RunCost, run_cost
from zsim.report.job_features import framework_title
from zsim.specs.experiment.load import build_experiment
from zsim.specs.experiment.tables import CostTable, Experiment
from zsim.specs.model.expert_layer import has_experts
from zsim.specs.prices import Price
from zsim.study.differences import range_of_row, verdict_of_row
from zsim.study.tune.axes import (
    Candidate,
    base_of,
    change_kind,
    coarse_choices,
    divisors,
    micro_batch_choice,
    structure_of,
)
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.framework import MICRO_BATCH, AxisChoice, Base
from zsim.validated.verdict import Verdict, verdict_content, verdict_of

# Global batches of Llama 2 (Touvron et al. 2023, arXiv 2307.09288): 4M tokens in pretraining (table 1), 64
# sequences in supervised fine-tuning (section 3.1).
PRETRAINING_BATCH_TOKENS = 4_194_304
FINE_TUNING_BATCH = 64
PRETRAINING_TOKENS = 1e9  # from this number of tokens on a run has the batch of pretraining
METHODS = ("full", "lora", "qlora")
_RANK = 16
# Tables on one cluster, or on what happens to it, and those that no step depends on.
_CLUSTER_KEYS = ("nodes", "gpus", "placement", "faults", "jitter", "jobs", "cost")


@dataclass(frozen=True)
class RentQuestion:
    """A training of so many tokens, its limits, and how it may be cut over GPUs."""

    data: Mapping[str, Any]
    """The experiment, file-shaped, without its cluster."""
    kinds: Sequence[str]
    """The strategies to look at."""
    batch: int
    """Sequences of a step of all GPUs, which every number of GPUs keeps."""
    length: CostTable
    """Tokens or samples to train on, and how often."""
    model_ranks: int = 1
    """Ranks that share a replica of the model."""
    max_hours: float = 720.0
    max_money: float | None = None
    max_gpus: int = 1024

    def base(self, cluster: str, gpus: int, kind: str, simulator: Simulator) -> Base:
        """The training on so many GPUs of a cluster, as the start of a search, with micro-batches of one
        sequence. `simulator` reads the cluster's files.

        Raises InputError and NotSimulatedError as `resolve` does.
        """
        steps = self.batch // (gpus // self.model_ranks)
        training = {**self.data.get("training", {}), "micro_batch_size": 1}
        training["gradient_accumulation_steps"] = steps
        data = {**self.data, "cluster": cluster, "gpus": gpus, "training": training}
        return change_kind(base_of(build_experiment(data, {}, origin="rent"), simulator), kind, simulator)

    def steps(self, base: Base) -> float:
        """Steps of the run, at least one."""
        sequence_length = base.job.training.sequence_length
        tokens = self.length.run_tokens(sequence_length)
        assert tokens is not None, "it has a length"
        return max(1.0, tokens / (self.batch * sequence_length))

    def allows(self, gpus: int) -> bool:
        """Whether replicas on so many GPUs divide the batch."""
        replicas, remainder = divmod(gpus, self.model_ranks)
        return gpus <= self.max_gpus and remainder == 0 and replicas > 0 and self.batch % replicas == 0


def method_changes(method: str, training: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides of an experiment with this `[training]` for a method of `METHODS`.

    Raises InputError for another name.
    """
    if method not in METHODS:
        raise InputError(f"--method {method}: expected one of {', '.join(METHODS)}")
    if method == "full":
        return {"training.lora": None} if training.get("lora") else {}
    changes: dict[str, Any] = {} if training.get("lora") else {"training.lora.rank": _RANK}
    return changes | {"training.lora.quantized": "nf4" if method == "qlora" else None}


def usual_batch(tokens: float, sequence_length: int) -> int:
    """Sequences of a step where nothing says how many: those of `PRETRAINING_BATCH_TOKENS`, as a power of two
    that many numbers of GPUs divide, or `FINE_TUNING_BATCH` below `PRETRAINING_TOKENS`.
    """
    if tokens < PRETRAINING_TOKENS:
        return FINE_TUNING_BATCH
    sequences = max(1, PRETRAINING_BATCH_TOKENS // sequence_length)
    return 1 << (sequences.bit_length() - 1)


def rent_question(
    experiment: Experiment, length: CostTable, kinds: Sequence[str], batch: int | None, *, is_usual: bool
) -> RentQuestion:
    """The question on an experiment's training, whose cluster does not count, with the usual limits.

    Without `kinds` the strategy is the experiment's own. Without a `batch` it is the experiment's global
    batch, or with `is_usual` that of `usual_batch`. Raises InputError for a run without a length, and for
    experiments of reinforcement learning.
    """
    if experiment.rl is not None:
        raise InputError("rent: found [rl], whose steps are not searched; expected a training")
    if length.tokens is None and length.samples is None:
        raise InputError("rent: how long is the run? expected --tokens N (20M, 1T) or --samples N")
    start = base_of(experiment)
    length = length.scale_samples(experiment.training.sequences_per_sample)
    sequence_length = start.job.training.sequence_length
    tokens = length.run_tokens(sequence_length)
    assert tokens is not None, "it has a length"
    usual = usual_batch(tokens, sequence_length) if is_usual else start.batch_sequences
    data = {key: value for key, value in start.data.items() if key not in _CLUSTER_KEYS}
    training = {key: value for key, value in data.get("training", {}).items() if key != "global_batch_size"}
    return RentQuestion(
        {**data, "training": training}, tuple(kinds) or (start.kind,), batch or usual, length,
        start.job.parallelism.model_ranks,
    )  # fmt: skip


_HOURS_PER_DAY = 24.0


@dataclass(frozen=True)
class Offer:
    """A number of GPUs of a cluster, the configuration to run on them, and what the run then takes."""

    cluster: str
    gpus: int
    label: str
    """The configuration in words."""
    overrides: Mapping[str, Any]
    """The configuration as keys of an experiment."""
    verdict: Verdict
    step_seconds: float
    step_seconds_range: tuple[float, float]
    """The interval of 80 %."""
    cost: RunCost
    price: Price | None

    @property
    def hours(self) -> float:
        return _HOURS_PER_DAY * (self.cost.days or 0.0)

    @property
    def gpu_hours(self) -> float:
        return self.cost.gpu_hours or 0.0

    @property
    def money(self) -> float | None:
        return self.cost.money

    @property
    def outlay(self) -> float:
        """Money, or GPU-hours where the price is not known: the quantity to be minimised."""
        return self.gpu_hours if self.money is None else self.money

    def scale(self, value: float) -> tuple[float, float]:
        """The interval of a quantity that is proportional to the step."""
        low, high = self.step_seconds_range
        return value * low / self.step_seconds, value * high / self.step_seconds

    def to_dict(self) -> dict[str, Any]:
        money = self.money
        return {
            "cluster": self.cluster, "gpus": self.gpus, "label": self.label,
            "overrides": dict(self.overrides), **verdict_content(self.verdict),
            "step_seconds": self.step_seconds, "step_seconds_range": list(self.step_seconds_range),
            "days": self.cost.days, "days_range": list(self.scale(self.cost.days or 0.0)),
            "gpu_hours": self.gpu_hours, "money": money,
            "money_range": None if money is None else list(self.scale(money)),
            "currency": self.cost.currency,
            "price": None if self.price is None else self.price.model_dump(),
        }  # fmt: skip


def offer_of(
    result: CandidateResult, cluster: str, length: CostTable, price: Price | None, currency: str
) -> Offer:
    """The offer of a simulated configuration on a cluster, for a run of this length."""
    row, base = result.row, result.candidate.base
    table = length.model_copy(
        update={"gpu_hour_price": None if price is None else price.gpu_hour_price, "currency": currency}
    )
    cost = run_cost(
        table, None, step_seconds=result.seconds, step_tokens=row["step_tokens"],
        step_samples=base.batch_sequences, gpus=result.gpus, nodes=row["nodes"],
        parameters=base.job.model.numel,
    )  # fmt: skip
    verdict = verdict_of_row(row)
    assert verdict is not None, "a row of this release has one"
    interval = range_of_row(row) or (result.seconds, result.seconds)
    return Offer(
        cluster, result.gpus, result.candidate.label, result.candidate.overrides, verdict, result.seconds,
        interval, cost, price,
    )  # fmt: skip


_MAX_COUNTS = 5  # numbers of GPUs that are tried
_EXPOSED = 0.15  # of a step, from which on larger micro-batches are tried
_NEAR = 0.95  # of the cheapest: a lower bound from there on is not simulated, since steps take more
_MAX_SIMULATED = 4  # configurations of a cluster, and of these at most so many on one number of GPUs:
_MAX_RETRIES = 3
_MAX_OFFERS = 2  # numbers of GPUs of a cluster that are simulated
_WORTH = 0.01  # of the money, below which more GPUs are not cheaper
_SHORT = "runs short"  # a verdict: torch's allocator gives its cache back in every step
_CHECKPOINTING, _LOSS, _BATCH, _OFFLOAD = "checkpointing", "cross-entropy", "micro-batch", "offload"


@dataclass(frozen=True)
class ClusterSearch:
    """The outcome on one cluster."""

    cluster: str
    offer: Offer | None
    """The cheapest that finishes in time, or else the fastest that fits. None where nothing fits, or where
    nothing was simulated.
    """
    is_in_time: bool
    counts: tuple[int, ...]
    """The numbers of GPUs that were tried."""
    reason: str = ""
    """Why there is no offer."""
    least_outlay: float | None = None
    """The least that a run costs, where the search ended before a simulation because of it."""


@dataclass(frozen=True)
class _Planned:
    """A configuration that fits, and the lower bounds on its step."""

    candidate: Candidate
    seconds: float
    """The least time of the plan, with the traffic of each resource."""
    kernel_seconds: float
    """The least time of its kernels alone."""
    is_safe: bool
    """Whether its tensors fit with a probability of at least 90 %."""

    @property
    def outlay(self) -> float:
        """GPU-seconds of a step, to which money is proportional."""
        return self.seconds * self.candidate.base.world_size


class ClusterQuestion:
    """The question on one cluster, answered in three stages, each of which costs more time: by its kernels,
    by the plans of the configurations that fit, and by simulation.
    """

    def __init__(
        self, question: RentQuestion, cluster: str, price: Price | None, currency: str, evaluator: Evaluator
    ) -> None:
        self.cluster = cluster
        self._question, self._evaluator = question, evaluator
        self._price, self._currency = price, currency
        self._counts = _counts(question, evaluator.simulator.cluster(cluster).gpus_per_node, price)
        self._plans: list[_Planned] = []
        self._tried: list[int] = []

    def kernel_outlay(self) -> float:
        """The least outlay of a run by its kernels alone, on the first number of GPUs. 0 if it is not known.

        Raises InputError and NotSimulatedError for a training that the cluster cannot run in any number.
        """
        if not self._counts:
            return 0.0
        start = self._base(self._counts[0])
        bound = self._evaluator.bound(_candidates(start)[0])
        return 0.0 if bound is None else self._outlay(start, bound.seconds)

    def plan_outlay(self) -> float:
        """The least outlay of the configurations that fit and may end in time, by the traffic of their plans.
        Infinite without one.
        """
        start = self._first_count() if self._counts else 0
        for count in self._counts[start : start + _MAX_COUNTS]:
            self._tried.append(count)
            planned = self._best_planned(count)
            if planned is None:
                continue
            rivals = [rival for rival in self._plans if not _is_offloaded(rival.candidate)]
            self._plans.append(planned)
            if rivals and planned.outlay > min(rival.outlay for rival in rivals) * (1 - _WORTH):
                break
        quick = [planned for planned in self._plans if not self._is_slow(planned)]
        return min(map(self._planned_outlay, quick), default=inf)

    def simulate(self) -> ClusterSearch:
        """The cheapest number of GPUs with its configuration."""
        offers, tried = self._simulated_offers(), tuple(self._tried)
        in_time = [offer for offer in offers if offer.hours <= self._question.max_hours]
        if in_time:
            return ClusterSearch(self.cluster, min(in_time, key=lambda offer: offer.outlay), True, tried)
        if offers:
            return ClusterSearch(self.cluster, min(offers, key=lambda offer: offer.hours), False, tried)
        reason = f"no number of GPUs divides {self._question.batch} sequences"
        if tried:
            reason = f"does not fit on {tried[-1]:,} GPU{'s' if tried[-1] > 1 else ''}"
        return ClusterSearch(self.cluster, None, False, tried, reason)

    def skip(self, least_outlay: float) -> ClusterSearch:
        """The outcome where a run costs at least so much, which is too much."""
        return ClusterSearch(self.cluster, None, False, tuple(self._tried), "dearer", least_outlay)

    def _base(self, count: int, kind: str | None = None) -> Base:
        kind = kind or self._question.kinds[0]
        return self._question.base(self.cluster, count, kind, self._evaluator.simulator)

    def _outlay(self, base: Base, seconds: float) -> float:
        rate = 1.0 if self._price is None else self._price.gpu_hour_price
        return seconds * base.world_size * self._question.steps(base) / 3600.0 * rate

    def _planned_outlay(self, planned: _Planned) -> float:
        return self._outlay(planned.candidate.base, planned.seconds)

    def _is_slow(self, planned: _Planned) -> bool:
        hours = planned.seconds * self._question.steps(planned.candidate.base) / 3600.0
        return hours > self._question.max_hours

    def _first_count(self) -> int:
        """The index of the least number of GPUs on which the kernels of a run, without any communication, end
        in time."""
        counts, base = self._counts, self._base(self._counts[0])
        bound = self._evaluator.bound(_candidates(base)[0])
        if bound is None:
            return 0
        hours = self._question.steps(base) * bound.seconds / 3600.0
        least = counts[0] * hours / self._question.max_hours
        return next((index for index, count in enumerate(counts) if count >= least), len(counts) - 1)

    def _best_planned(self, count: int) -> _Planned | None:
        """The fastest by their bounds of the first configurations of each strategy that fit. None where none
        does.
        """
        best: _Planned | None = None
        for kind in self._question.kinds:
            base = self._base(count, kind)
            limit = inf if best is None else best.seconds
            first = _first_planned(self._evaluator, base, limit)
            if first is not None:
                first = _enlarge_micro_batches(self._evaluator, first)
            if first is not None and (best is None or first.seconds < best.seconds):
                best = first
        return best

    def _simulated_offers(self) -> list[Offer]:
        """The offers of the plans, simulated from the lowest bound on the money on, until no bound is much
        below the cheapest of those in time. Plans that offload come after the others, since they are further
        from their bounds. Of those too slow by their bounds the largest is simulated, if there are no others.
        """
        offers: list[Offer] = []
        cheapest, budget = inf, _MAX_SIMULATED
        slow = [planned for planned in self._plans if self._is_slow(planned)]
        quick = [planned for planned in self._plans if planned not in slow]
        order = sorted(quick, key=lambda plan: (_is_offloaded(plan.candidate), plan.outlay)) or slow[-1:]
        for planned in order:
            if len(offers) == _MAX_OFFERS or budget <= 0:
                break
            if self._planned_outlay(planned) >= cheapest * _NEAR:
                continue
            result, simulated = _first_safe_result(self._evaluator, planned.candidate, budget)
            budget -= simulated
            if result is None:
                continue
            offer = offer_of(result, self.cluster, self._question.length, self._price, self._currency)
            offers.append(offer)
            if offer.hours <= self._question.max_hours:
                cheapest = min(cheapest, offer.outlay)
        return offers


def _first_safe_result(
    evaluator: Evaluator, start: Candidate, budget: int
) -> tuple[CandidateResult | None, int]:
    """(the simulated candidate, or where torch's allocator runs short in it the next one of its strategy that
    fits without, how many were simulated). Without such a one, the first that is likelier to fit than not.
    """
    likely: CandidateResult | None = None
    heavier = [candidate for candidate in _candidates(start.base) if candidate.number > start.number]
    num_simulated = 0
    for candidate in (start, *heavier):
        if num_simulated == min(budget, _MAX_RETRIES):
            break
        if _planned(evaluator, candidate, inf) is None:
            continue
        num_simulated += 1
        (result,) = evaluator.simulate([candidate])
        verdict = None if result is None else verdict_of_row(result.row)
        if result is None or verdict is None or result.may_run_out:
            continue
        if verdict.is_likely and verdict.word != _SHORT:
            return result, num_simulated
        if verdict.is_likely and likely is None:
            likely = result
    return likely, num_simulated


def _is_offloaded(candidate: Candidate) -> bool:
    """Whether something is kept on hosts or drives, so that more GPUs may do without it and be cheaper."""
    return bool(candidate.choices[_OFFLOAD].label)


def _counts(question: RentQuestion, per_node: int, price: Price | None) -> list[int]:
    """The numbers of GPUs that can be rented and divide the batch: parts of a node, then nodes in powers of
    two."""
    least = 1 if price is None else price.instance_gpus
    most = question.max_gpus if price is None or price.most_gpus is None else price.most_gpus
    counts = [count for count in divisors(per_node) if count % least == 0]
    counts += [per_node << power for power in range(1, question.max_gpus.bit_length())]
    return [count for count in counts if count <= most and question.allows(count)]


def _first_planned(evaluator: Evaluator, base: Base, limit: float) -> _Planned | None:
    """The first configuration of a strategy whose tensors fit safely, or else the first that likely fit. None
    where none does in less than `limit` seconds.
    """
    likely: _Planned | None = None
    for candidate in _candidates(base):
        planned = _planned(evaluator, candidate, limit)
        if planned is not None and planned.is_safe:
            return planned
        likely = likely or planned
    return likely


def _planned(evaluator: Evaluator, candidate: Candidate, limit: float) -> _Planned | None:
    """The candidate with the bound of its plan. None if it is likelier not to fit, or cannot take less than
    `limit` seconds.
    """
    bound = evaluator.bound(candidate)
    if bound is None or bound.seconds >= limit or evaluator.is_too_large(candidate, bound):
        return None
    (memory,) = evaluator.memory([candidate])
    if memory is None or not evaluator.fits(memory) or memory.least_seconds >= limit:
        return None
    job = candidate.base.job
    load = max(memory.peaks[device] / max(1, memory.limits[device]) for device in memory.peaks)
    verdict = verdict_of(load, framework_title(job), is_mixture=has_experts(job.model))
    return _Planned(candidate, memory.least_seconds, bound.seconds, verdict.word == "fits")


def _enlarge_micro_batches(evaluator: Evaluator, start: _Planned) -> _Planned:
    """The plan with larger micro-batches and all blocks recomputed, as long as each has a lower bound."""
    best, base = start, start.candidate.base
    choices = coarse_choices(base, structure_of(base.kind))
    full = choices[_CHECKPOINTING][-1:]
    if not full or best.seconds < best.kernel_seconds * (1 + _EXPOSED):
        return best
    losses = choices.get(_LOSS, [])[1:]
    for size in divisors(base.sequences):
        if size <= start.candidate.overrides[MICRO_BATCH]:
            continue
        larger = start.candidate.replace_choice(_CHECKPOINTING, full[0], start.candidate.number)
        batch = micro_batch_choice(size, base.sequences // size)
        larger = larger.replace_choice(_BATCH, batch, larger.number)
        variants = [larger, *(larger.replace_choice(_LOSS, loss, larger.number) for loss in losses)]
        plans = (_planned(evaluator, variant, best.seconds * (1 - _WORTH)) for variant in variants)
        planned = next(
            (planned for planned in plans if planned is not None and planned.is_safe >= start.is_safe), None
        )
        if planned is None:
            break
        best = planned
    return best


def _candidates(base: Base) -> list[Candidate]:
    """The configurations of a strategy in the order in which they cost time."""
    return [Candidate(base, choices, number) for number, choices in enumerate(_choice_sets(base))]


def _choice_sets(base: Base) -> Iterator[dict[str, AxisChoice]]:
    choices = coarse_choices(base, structure_of(base.kind))
    checkpointings, batches = choices[_CHECKPOINTING], choices[_BATCH]
    for offload in choices.get(_OFFLOAD) or [AxisChoice("", {})]:
        for checkpointing in checkpointings:
            for batch in reversed(batches):
                yield {_OFFLOAD: offload, _CHECKPOINTING: checkpointing, _BATCH: batch}
        for loss in choices.get(_LOSS, [])[1:]:
            yield {
                _OFFLOAD: offload, _CHECKPOINTING: checkpointings[-1], _LOSS: loss, _BATCH: batches[0],
            }  # fmt: skip
