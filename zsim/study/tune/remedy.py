"""The remedy for a job that does not fit: the cheapest switch that its program has, simulated.

The switches are sharding, checkpointing, the loss, offloading and smaller micro-batches. They are tried one
by one, then, if none is enough, in pairs, and so on. If all of them are not enough, other degrees of
parallelism are tried, first without and then with the lightest switches, and at last adapters on the frozen
model.

Degrees are of expert, tensor and pipeline parallelism, in powers of two, small replicas first. The batch of a
step stays. If there are none, or none is enough, the model is frozen and LoRA trains adapters, alone and then
with other degrees: another kind of training, so it comes last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from zsim.engine.micro_batches import limit_micro_batches, shorten_micro_batches
from zsim.engine.simulator import Simulator
from zsim.errors import ZsimError
from zsim.plan.memory.capacity import ResidentMemory, largest_ratio, peak_bytes, resident_memory, tier_usage
from zsim.plan.ops import Plan
from zsim.report.memory import Remedy
from zsim.report.views.text.sentences import SHARDING
from zsim.specs.experiment.job import Job
from zsim.specs.experiment.tables import Experiment
from zsim.specs.model.expert_layer import has_experts, num_experts
from zsim.specs.model.spec import ModelSpec
from zsim.study.differences import verdict_of_row
from zsim.study.tune.axes import (
    EXPERT,
    PIPELINE,
    SPLIT,
    TENSOR,
    Candidate,
    base_of,
    choices_of,
    is_current,
    structure_of,
)
from zsim.study.tune.bounds import block_kinds, plan_seconds
from zsim.study.tune.evaluate import CandidateResult, Evaluator
from zsim.study.tune.explain import script_changes
from zsim.study.tune.framework import ACCUMULATION, MICRO_BATCH, AxisChoice, Base, TunedAxis, tuning_of
from zsim.units import format_setting

LORA = "training.lora.rank"
_MAX_DEGREES = 24  # each is a plan, and the first ones that fit are wanted
_RANK = 16
_FROZEN = "adapters"


def degree_changes(start: Candidate) -> Iterator[Candidate]:
    """The job with other degrees, larger than its own, that divide the GPUs, heads, layers and experts."""
    base = start.base
    if not tuning_of(base.kind).schedules:
        return
    split, model = base.job.parallelism, base.job.model
    experts = _powers(num_experts(model), split.experts.members)
    tensors = [degree for degree in _powers(base.job.gpus_per_node, split.tensor) if _divides(model, degree)]
    pipelines = [
        degree
        for degree in _powers(base.world_size, split.pipeline)
        if len(model.blocks) % degree == 0 or degree == split.pipeline
    ]
    sizes = sorted(product(pipelines, tensors, experts), key=lambda size: (size[0] * size[1], sum(size)))
    num_yielded = 0
    current_degrees = {PIPELINE: split.pipeline, TENSOR: split.tensor, EXPERT: split.experts.members}
    for pipeline, tensor, expert in sizes:
        degrees = zip(current_degrees, (pipeline, tensor, expert), strict=True)
        changes: dict[str, Any] = {key: degree for key, degree in degrees if degree != current_degrees[key]}
        if TENSOR in changes and has_experts(model) and not split.sequence_parallel:
            changes[SPLIT] = True  # tensor ranks with routed experts are refused without it
        accumulation = _accumulation(base, pipeline * tensor)
        if not changes or accumulation is None or num_yielded == _MAX_DEGREES:
            continue
        if accumulation != base.job.training.gradient_accumulation_steps:
            changes[ACCUMULATION] = accumulation
        num_yielded += 1
        yield start.replace_choice("degrees", AxisChoice("", changes), -1)


def adapter_change(start: Candidate) -> Candidate | None:
    """The job with LoRA on the frozen model, or None if it has adapters."""
    if start.base.job.experiment.training.lora is not None:
        return None
    return start.replace_choice(_FROZEN, AxisChoice("", {LORA: _RANK}), -1)


def _powers(total: int, minimum: int) -> list[int]:
    """The powers of two of at least `minimum` that divide `total`, and `minimum`."""
    degrees = [1 << power for power in range(max(1, total).bit_length()) if total % (1 << power) == 0]
    return [minimum, *(degree for degree in degrees if degree > minimum)]


def _divides(model: ModelSpec, degree: int) -> bool:
    op_specs = [module.op_spec for block in model.blocks for module in block.modules]
    return all(getattr(op_spec, "num_heads", degree) % degree == 0 for op_spec in op_specs)


def _accumulation(base: Base, ranks_per_replica: int) -> int | None:
    """Micro-batches with which fewer replicas train on the same batch. None without a whole number."""
    split, training = base.job.parallelism, base.job.training
    replicas, remainder = divmod(base.world_size, ranks_per_replica * split.context)
    if remainder or not replicas:
        return None
    accumulation, remainder = divmod(base.batch_sequences, replicas * training.micro_batch_size)
    return None if remainder or not accumulation else accumulation


_MAX_SIMULATED = 3
_SHARDING = ("stage", "optimizer", "sharding", "reshard")
AXES = (*_SHARDING, "checkpointing", "cross-entropy", "offload", "micro-batch")

_WORDS = {
    **dict.fromkeys(_SHARDING, SHARDING),
    "cross-entropy": "another loss",
    "offload": "offloading",
    "micro-batch": "smaller micro-batches",
}


def tried_changes(experiment: Experiment) -> tuple[str, ...]:
    """The changes that `remedy_of` tries for an experiment, in words."""
    kind = experiment.strategy.kind
    words = [_WORDS.get(axis.name, axis.name) for axis in structure_of(kind) if axis.name in AXES]
    degrees = ["larger degrees of parallelism"] if tuning_of(kind).schedules else []
    adapters = ["LoRA"] if experiment.training.lora is None else []
    return tuple(dict.fromkeys([*words, *degrees, *adapters]))


def remedy_of(experiment: Experiment, simulator: Simulator | None = None) -> Remedy | None:
    """The fewest switches with which the job fits, of these the ones with the shortest step. None if nothing
    helps. `simulator` is one that has made some plans already.
    """
    try:
        start = Candidate(base_of(experiment), {}, -1)
        measured = cheapest_switch(Evaluator(simulator=simulator), start)
    except ZsimError:
        return None
    return None if measured is None else remedy_from(experiment, start, measured)


def remedy_from(experiment: Experiment, start: Candidate, measured: CandidateResult) -> Remedy:
    """The changes of `measured` against `start`, under the keys of `experiment`."""
    table, training = experiment.strategy, experiment.training
    tuning = tuning_of(table.kind)
    changes: dict[str, Any] = {}
    assignments: list[str] = []
    for key, value in measured.candidate.overrides.items():
        if is_current(start.base, key, value):
            continue
        shown_key = tuning.written_key(table, key)
        changes[shown_key] = value
        table_name, _, name = key.partition(".")
        if shown_key != key and table_name == "training" and getattr(training, name) is not None:
            changes[key] = value  # the experiment sets it in both places
        assignments.append(f"{shown_key.removeprefix('strategy.config.')} = {_format_value(value)}")
    verdict = verdict_of_row(measured.row)
    return Remedy(
        changes,
        " and ".join(assignments),
        measured.gpu_bytes,
        measured.seconds,
        tuple(script_changes(measured.candidate)),
        None if verdict is None or verdict.is_sure else verdict.probability,
    )


@dataclass(frozen=True, slots=True)
class _PlanCheck:
    """A candidate evaluated by its plan: a GPU's peak, whether it fits every tier, the lower bound on its
    step."""

    candidate: Candidate
    gpu_bytes: int
    fits: bool
    seconds: float
    job: Job


def cheapest_switch(evaluator: Evaluator, start: Candidate) -> CandidateResult | None:
    """The result with the fewest switches that fits, among equals the one with the shortest step. Without
    one, the first larger change that fits.
    """
    axes = [axis for axis in structure_of(start.base.kind) if axis.name in AXES]
    singles = list(_single_changes(start, axes))
    _check_plan(evaluator, start)  # what it holds before a step may be too much for many switches
    checks = [
        None if evaluator.holds_too_much(candidate) else _check_plan(evaluator, candidate)
        for candidate in singles
    ]
    if not any(checks):  # nor does any combination of the others fit
        return _larger_change(evaluator, start, singles)
    best = _shortest(evaluator, _minimal([check for check in checks if check is not None and check.fits]))
    if best is not None:
        return best
    complete = [
        check or _check_plan(evaluator, candidate) for check, candidate in zip(checks, singles, strict=True)
    ]
    for combination in _combined_checks(evaluator, start, singles, complete):
        best = _shortest(evaluator, _minimal([check for check in combination if check.fits]))
        if best is not None:
            return best
    return _larger_change(evaluator, start, singles)


def _larger_change(
    evaluator: Evaluator, start: Candidate, singles: Sequence[Candidate]
) -> CandidateResult | None:
    """The first larger change that fits, with as few of the lightest switches as it needs."""
    lightest: dict[str, AxisChoice] = {}
    for single in singles:  # an axis's choices come from the least to the most
        lightest |= single.choices
    frozen = adapter_change(start)
    adapters = [] if frozen is None else [frozen, *degree_changes(frozen)]
    for changed in (*degree_changes(start), *adapters):
        best = _check_plan(evaluator, changed)
        if best is None or not best.fits:
            best = _add_lightest(evaluator, changed, lightest)
        measured = None if best is None else _shortest(evaluator, [best])
        if measured is not None:
            return measured
    return None


def _add_lightest(
    evaluator: Evaluator, changed: Candidate, lightest: Mapping[str, AxisChoice]
) -> _PlanCheck | None:
    """The changed job with the first of the lightest switches that makes it fit, or with all of them. None if
    all are not enough.
    """
    all_lightest = _check_plan(evaluator, Candidate(changed.base, {**lightest, **changed.choices}, -1))
    if all_lightest is None or not all_lightest.fits:
        return None
    single_checks = (
        _check_plan(evaluator, changed.replace_choice(name, choice, -1)) for name, choice in lightest.items()
    )
    return next((check for check in single_checks if check is not None and check.fits), all_lightest)


def _minimal(fitting: Sequence[_PlanCheck]) -> list[_PlanCheck]:
    """The candidates without those whose changes include all changes of another one."""
    changes = [{(key, str(value)) for key, value in check.candidate.overrides.items()} for check in fitting]
    return [
        check
        for check, change_set in zip(fitting, changes, strict=True)
        if not any(smaller < change_set for smaller in changes)
    ]


def _shortest(evaluator: Evaluator, fitting: Sequence[_PlanCheck]) -> CandidateResult | None:
    """The shortest simulated step of the few candidates with the lowest bounds. A candidate is simulated only
    if its bound is below the best so far.
    """
    ranked = sorted(fitting, key=lambda check: check.seconds)[:_MAX_SIMULATED]
    if any(_sampled_jobs(check.job) for check in ranked):
        return _first_with_room(evaluator, ranked)
    best: CandidateResult | None = None
    for check in ranked:
        if best is not None and check.seconds >= best.seconds:
            break
        measured = _simulate_with_room(evaluator, check)
        if measured is not None and (best is None or measured.seconds < best.seconds):
            best = measured
    return best


def _simulate_with_room(evaluator: Evaluator, check: _PlanCheck) -> CandidateResult | None:
    """The simulated candidate, or None if it does not fit or if torch's allocator may run out of memory."""
    (measured,) = evaluator.simulate([check.candidate])
    return measured if measured is not None and measured.row["fits"] and not measured.may_run_out else None


def _first_with_room(evaluator: Evaluator, ranked: Sequence[_PlanCheck]) -> CandidateResult | None:
    """The candidate with very many blocks whose step with fewer blocks says that it is the shortest, or whose
    lower bound does where these cannot tell of each. If it has no room, the one that needs least memory.
    """
    estimates = [_estimate_step(evaluator.simulator, check.job) for check in ranked]
    sampled = [estimate for estimate in estimates if estimate is not None]
    seconds = sampled if len(sampled) == len(ranked) else [check.seconds for check in ranked]
    shortest = ranked[seconds.index(min(seconds))]
    smallest = min(ranked, key=lambda check: check.gpu_bytes)
    measured = _simulate_with_room(evaluator, shortest)
    return measured if measured or smallest is shortest else _simulate_with_room(evaluator, smallest)


def _check_plan(evaluator: Evaluator, candidate: Candidate) -> _PlanCheck | None:
    """The candidate evaluated by its plan, or None if it contradicts itself or has no plan.

    Without a pipeline two micro-batches suffice, since more do not change memory. A pipeline has to be full.
    """
    simulator = evaluator.simulator
    try:
        experiment = candidate.experiment()
        steps = experiment.training.gradient_accumulation_steps or 1
        full_job = simulator.job(experiment)
        if full_job.parallelism.pipeline > 1:
            job, steps = shorten_micro_batches(full_job), full_job.training.gradient_accumulation_steps
        else:
            job = simulator.job(limit_micro_batches(experiment, 2))
        figures = _estimate_figures(simulator, job) or _PlanFigures.of(job, simulator.plan(job))
    except ZsimError:
        return None
    evaluator.keep_resident(candidate, figures.resident)
    usable = evaluator.usable_bytes(candidate)
    return _PlanCheck(
        candidate,
        figures.gpu_bytes,
        figures.fill_ratio <= 1 and figures.gpu_bytes <= usable,
        figures.seconds * steps / job.training.gradient_accumulation_steps,
        full_job,
    )


# [Note: models of very many blocks]
# The plan of a model of thousands of equal blocks takes seconds, and a search makes dozens of plans. What a
# step holds and its lower bound grow linearly with the blocks, once the limits of frameworks (live
# parameters, buckets) are reached. So plans of three sizes tell the rest if two differences are one line.
# Where they are not, or where the answer is close to a limit, the whole model is planned. The proposed change
# is always simulated whole.
_MIN_BLOCKS = 512  # more than any published model has
_SAMPLED_BLOCKS = 32  # and twice and four times as many
_MAX_PERIOD = 16
_NONLINEARITY = 0.01  # fraction by which the differences per block may differ
_CLOSE = 0.02  # fraction of a limit within which the whole model is planned


@dataclass(frozen=True, slots=True)
class _PlanFigures:
    """The figures of a plan that the search reads."""

    seconds: float
    gpu_bytes: int
    tier_bytes: tuple[int, ...]
    """See `tier_usage`."""
    tier_limits: tuple[int, ...]
    resident: ResidentMemory

    @staticmethod
    def of(job: Job, plan: Plan) -> _PlanFigures:
        tier_bytes, tier_limits = zip(*tier_usage(job, plan), strict=True)
        seconds = max(plan_seconds(job, plan).values())
        return _PlanFigures(
            seconds, peak_bytes(job, plan), tier_bytes, tier_limits, resident_memory(job, plan)
        )

    @property
    def fill_ratio(self) -> float:
        return largest_ratio(zip(self.tier_bytes, self.tier_limits, strict=True))

    @property
    def numbers(self) -> list[float]:
        """The figures that grow with the blocks."""
        return [self.seconds, self.gpu_bytes, *self.tier_bytes, *self.resident.bytes.values()]

    def replace_numbers(self, numbers: Sequence[float]) -> _PlanFigures:
        """The figures with other `numbers`."""
        seconds, (gpu_bytes, *counts) = numbers[0], map(int, numbers[1:])
        tiers, resident = counts[: len(self.tier_bytes)], counts[len(self.tier_bytes) :]
        resident_bytes = dict(zip(self.resident.bytes, resident, strict=True))
        memory = ResidentMemory(resident_bytes, self.resident.limits)
        return _PlanFigures(seconds, gpu_bytes, tuple(tiers), self.tier_limits, memory)


def _sampled_jobs(job: Job) -> list[Job]:
    """The job with the first blocks of its model, three numbers of them. Empty if the model is not of very
    many blocks, or if they do not repeat, but for a few first ones.
    """
    if len(job.model.blocks) < _MIN_BLOCKS or job.parallelism.pipeline > 1:
        return []
    kinds = block_kinds(job.model, job.training)
    sizes = product(range(_MAX_PERIOD + 1), range(1, _MAX_PERIOD + 1))
    repeats = ((num_first, n) for num_first, n in sizes if kinds[num_first + n :] == kinds[num_first:-n])
    num_first, period = next(repeats, (0, 0))
    if not period:
        return []
    unit = -(-_SAMPLED_BLOCKS // period) * period
    policies: list[Any] = [policy for _, policy in kinds]
    return [
        replace(
            job,
            model=replace(job.model, blocks=job.model.blocks[:count]),
            training=replace(job.training, block_checkpointing=tuple(policies[:count])),
        )
        for count in (num_first + unit, num_first + 2 * unit, num_first + 4 * unit)
    ]


def _extrapolate(
    job: Job, sampled: Sequence[Job], values: Sequence[Sequence[float]]
) -> Sequence[float] | None:
    """The values for all blocks of `job` from those of each of `_sampled_jobs`. None if one of them is on no
    line.
    """
    counts = np.array([len(sample.model.blocks) for sample in sampled])
    first, second = np.diff(np.array(values), axis=0) / np.diff(counts)[:, None]
    if (np.abs(second - first) > _NONLINEARITY * np.maximum(np.abs(first), np.abs(second))).any():
        return None
    extrapolated: list[float] = (values[-1] + second * (len(job.model.blocks) - counts[-1])).tolist()
    return extrapolated


def _estimate_figures(simulator: Simulator, job: Job) -> _PlanFigures | None:
    """The figures of the whole model from plans of fewer blocks. None if they cannot tell. See
    [Note: models of very many blocks].
    """
    sampled = _sampled_jobs(job)
    figures = [_PlanFigures.of(sample, simulator.plan(sample)) for sample in sampled]
    if not figures or len({len(sample.tier_bytes) for sample in figures}) > 1:
        return None
    numbers = _extrapolate(job, sampled, [sample.numbers for sample in figures])
    if numbers is None:
        return None
    estimate = figures[-1].replace_numbers(numbers)
    return None if abs(estimate.fill_ratio - 1) < _CLOSE else estimate


def _estimate_step(simulator: Simulator, job: Job) -> float | None:
    """Seconds of the step of a model of very many blocks, from those of fewer. None where these cannot
    tell.
    """
    sampled = _sampled_jobs(job)
    try:
        seconds = [[simulator.step(sample).seconds] for sample in sampled]
    except ZsimError:
        return None
    estimate = _extrapolate(job, sampled, seconds) if sampled else None
    return None if estimate is None else estimate[0]


def _single_changes(start: Candidate, axes: Sequence[TunedAxis]) -> Iterator[Candidate]:
    """The job with one axis changed. Micro-batches only become smaller, stages only higher, and checkpointing
    only more, for which choices come from the least to the most.
    """
    for axis in axes:
        for choice in _stricter_choices(start, axis):
            changes = {
                key: value
                for key, value in choice.overrides.items()
                if not is_current(start.base, key, value)
            }
            is_larger = changes.get(MICRO_BATCH, 0) > start.base.job.training.micro_batch_size
            is_lower = tuning_of(start.base.kind).shards_less(start.base, changes)
            if changes and not is_larger and not is_lower:
                yield start.replace_choice(axis.name, replace(choice, overrides=changes), -1)


def _stricter_choices(start: Candidate, axis: TunedAxis) -> list[AxisChoice]:
    """An axis's choices. For checkpointing only those behind the job's own, if it is among them."""
    choices = list(choices_of(axis, start.base, {}))
    if axis.name != "checkpointing":
        return choices
    for number, choice in enumerate(choices):
        if all(is_current(start.base, key, value) for key, value in choice.overrides.items()):
            return choices[number + 1 :]
    return choices


def _combined_checks(
    evaluator: Evaluator,
    start: Candidate,
    singles: Sequence[Candidate],
    single_checks: Sequence[_PlanCheck | None],
) -> Iterator[list[_PlanCheck]]:
    """Every combination of two axes, then of three, and so on, of axes whose lightest choices fit in
    combination. An axis whose every choice is refused alone takes part with the last.
    """
    accepted = [check for check in single_checks if check is not None]
    by_bytes = [check.candidate for check in sorted(accepted, key=lambda check: check.gpu_bytes)]
    lightest: dict[str, AxisChoice] = {}
    for candidate in (*by_bytes, *reversed(singles)):
        ((name, choice),) = candidate.choices.items()
        lightest.setdefault(name, choice)
    choices = {name: [single.choices[name] for single in singles if name in single.choices]
               for name in lightest}  # fmt: skip

    def check_choices(choices: Mapping[str, AxisChoice]) -> _PlanCheck | None:
        candidate = Candidate(start.base, choices, -1)
        return None if evaluator.holds_too_much(candidate) else _check_plan(evaluator, candidate)

    for count in range(2, len(lightest) + 1):
        checks: list[_PlanCheck] = []
        for names in combinations(lightest, count):
            lightest_check = check_choices({name: lightest[name] for name in names})
            if lightest_check is not None and lightest_check.fits:
                choice_products = product(*(choices[name] for name in names))
                combined = (
                    check_choices(dict(zip(names, chosen, strict=True))) for chosen in choice_products
                )
                checks += [check for check in combined if check is not None]
        yield checks


def _format_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return str(value.get("device", value))
    return "none" if value is None else format_setting(value)
