"""The seven meanings of "best", each as a space of candidates and an objective.

The best of a space is refined and simulated in full. A result that may run out of memory ranks last.

# [Note: only the whole step shows it]
A step of many micro-batches is simulated with only a few of them. That is enough for its time and its
tensors, but not for where torch's allocator finds room: the blocks of later micro-batches lie among those of
earlier ones. So the first result is simulated in full, and if it runs out of memory, the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zsim.errors import InputError, ZsimError
from zsim.specs.model.huggingface import read_model_config
from zsim.specs.model.spec import ModelSpec
from zsim.study.differences import verdict_of_row
from zsim.study.search import least_number
from zsim.study.tune.axes import (
    LOSSES,
    Candidate,
    base_of,
    candidates,
    change_kind,
    divisors,
    resize_base,
    structure_of,
)
from zsim.study.tune.evaluate import CandidateResult, Evaluator, MemoryBounds, least_days
from zsim.study.tune.explain import differing_axes
from zsim.study.tune.framework import ACCUMULATION, LOSS, MICRO_BATCH, AxisChoice, Base, TunedAxis, tuning_of
from zsim.study.tune.search import (
    Objective,
    SearchResult,
    cheapest,
    choose_loss,
    fastest,
    refine,
    search,
    split_losses,
)
from zsim.validated.verdict import Verdict

_MAXIMUM = 2**17  # limit of sequences per micro-batch, layers, and multiples of _TOKENS in a sequence
_TOKENS = 256
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
Axes = Callable[[str], Sequence[TunedAxis]]


@dataclass(frozen=True)
class Space:
    """Candidates and their objective."""

    candidates: Sequence[Candidate]
    objective: Objective
    remark: str = ""
    """A sentence on the size that the goal decided to get these candidates ("" without one)."""
    fallback: Callable[[], Space | None] = lambda: None
    """The space to search if torch may not find room for any of these, or None if there is none."""


@dataclass(frozen=True)
class Question:
    """The inputs that every goal needs."""

    base: Base
    kinds: Sequence[str]
    keep: Sequence[str]
    evaluator: Evaluator

    def axes_of(self, kind: str) -> list[TunedAxis]:
        """The axes of a kind of strategy."""
        return list(structure_of(kind))

    def candidates(self, base: Base, axes_of: Axes | None = None) -> list[Candidate]:
        bases = [change_kind(base, kind) for kind in self.kinds]
        return candidates(bases, axes_of or self.axes_of, self.keep)


def _fastest(question: Question) -> Space:
    return Space(question.candidates(question.base), fastest)


def _fewest_days(question: Question) -> Space:
    """The fewest days of the whole run. No run is shorter than its steps, which bounds what is left out."""
    base = question.base
    tokens = base.batch_sequences * base.job.training.sequence_length
    per_second = least_days(question.evaluator.run, base.job.experiment.cost, tokens)

    def days(seconds: float, gpus: int) -> float:
        return seconds * per_second

    return Space(question.candidates(base), days)


def _cheapest(question: Question) -> Space:
    """The least GPU time, over every number of GPUs that divides the batch, up to the experiment's number."""
    space: list[Candidate] = []
    for nodes, gpus in _shapes(question.base):
        for candidate in question.candidates(_resize(question.base, nodes, gpus)):
            space.append(Candidate(candidate.base, candidate.choices, len(space)))
    return Space(space, cheapest)


def _smallest_cluster(question: Question) -> Space:
    """The fewest GPUs on which any candidate fits. The `fallback` is the next larger number."""
    shapes = _shapes(question.base)
    lightest = _fix_micro_batches(question, lambda base: [1])

    def fits(index: int) -> bool:
        return _any_fits(
            question.evaluator, question.candidates(_resize(question.base, *shapes[index]), lightest)
        )

    if not fits(len(shapes) - 1):
        raise InputError(f"nothing fits on {shapes[-1][1]} GPUs; expected more with --nodes")
    low, high = -1, len(shapes) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)

    def space_of(index: int, smaller: str = "") -> Space:
        nodes, gpus = shapes[index]
        gpus_text = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        remark = f"{gpus_text} ({nodes} node{'s' if nodes > 1 else ''}) are the fewest"

        def next_larger() -> Space | None:
            larger_fit = next(
                (larger_index for larger_index in range(index + 1, len(shapes)) if fits(larger_index)), None
            )
            return None if larger_fit is None else space_of(larger_fit, gpus_text)

        if smaller:
            remark += (
                f"; all tensors fit on {smaller} too, but torch's allocator may find no room for them there"
            )
        return Space(question.candidates(_resize(question.base, nodes, gpus)), fastest, remark, next_larger)

    return space_of(high)


def _largest_batch(question: Question) -> Space:
    """The largest number of sequences in one micro-batch."""

    def axes(size: int) -> Axes:
        return _fix_micro_batches(question, lambda base: [size])

    size = _largest(
        lambda size: _any_fits(question.evaluator, question.candidates(question.base, axes(size)))
    )
    if size == 0:
        raise InputError("not even one sequence per GPU fits; expected more GPUs, or shorter sequences")
    remark = f"{size} sequences per GPU in one micro-batch are the most that fit"
    return Space(question.candidates(question.base, axes(size)), fastest, remark)


def _longest_sequence(question: Question) -> Space:
    """The longest sequence, in multiples of 256 tokens, with one sequence per micro-batch. A sequence is
    never split over GPUs.
    """
    base, key = question.base, "training.sequence_length"
    lightest = _fix_micro_batches(question, lambda base: [1])

    def lengthen(count: int) -> Base:
        return base_of(base.experiment({key: count * _TOKENS}))

    count = _largest(
        lambda count: _any_fits(question.evaluator, question.candidates(lengthen(count), lightest))
    )
    if count == 0:
        raise InputError(f"not even {_TOKENS} tokens per sequence fit; expected more GPUs")
    remark = (
        f"sequences of {count * _TOKENS:,} tokens instead of {base.job.training.sequence_length:,} are the "
        "longest that fit"
    )
    return Space(question.candidates(lengthen(count), lightest), fastest, remark)


def _largest_model(question: Question) -> Space:
    """The same architecture with the largest number of layers."""
    base = question.base
    key, layers = _layers(base)
    lightest = _fix_micro_batches(question, lambda base: [1])

    def resize(count: int) -> Base:
        experiment = base.experiment({f"model.{key}": count})
        return base_of(experiment)

    def fits(count: int) -> bool:
        return _any_fits(question.evaluator, question.candidates(resize(count), lightest))

    count = _largest(fits)
    if count == 0:
        raise InputError("not even one layer fits; expected more GPUs")
    largest = resize(count)
    remark = (
        f"{count} layers instead of {layers} are the most that fit: "
        f"{largest.job.model.numel / 1e9:.1f}B parameters instead of {base.job.model.numel / 1e9:.1f}B"
    )
    return Space(question.candidates(largest), fastest, remark)


GOALS: Mapping[str, Callable[[Question], Space]] = {
    "fastest": _fastest,
    "cheapest": _cheapest,
    "fewest-days": _fewest_days,
    "smallest-cluster": _smallest_cluster,
    "largest-model": _largest_model,
    "largest-batch": _largest_batch,
    "longest-sequence": _longest_sequence,
}


def _shapes(base: Base) -> list[tuple[int, int]]:
    """(nodes, GPUs) that divide the batch, ascending: parts of a node, then whole nodes."""
    per_node = base.job.cluster.gpus_per_node
    total, model_ranks = base.batch_sequences, base.job.parallelism.model_ranks
    shapes = [(1, count) for count in divisors(per_node)]
    shapes += [(nodes, nodes * per_node) for nodes in range(2, base.job.num_nodes + 1)]
    return [
        (nodes, gpus)
        for nodes, gpus in shapes
        if gpus % model_ranks == 0 and total % (gpus // model_ranks) == 0 and gpus <= base.world_size
    ]


def _resize(base: Base, nodes: int, gpus: int) -> Base:
    return base if gpus == base.world_size else resize_base(base, nodes, gpus)


def _fix_micro_batches(question: Question, sizes: Callable[[Base], Sequence[int]]) -> Axes:
    """The axes of a kind with only these micro-batch sizes, those above 1 without gradient accumulation."""

    def choices(base: Base, chosen: Mapping[str, Any]) -> list[AxisChoice]:
        options = []
        for size in sizes(base):
            steps = base.sequences // size if base.sequences % size == 0 else 1
            steps = 1 if size > 1 else steps
            options.append(AxisChoice(f"micro-batch {size}", {MICRO_BATCH: size, ACCUMULATION: steps}))
        return options

    def axes(kind: str) -> list[TunedAxis]:
        return [
            TunedAxis(axis.name, choices) if axis.name == "micro-batch" else axis
            for axis in question.axes_of(kind)
        ]

    return axes


def _any_fits(evaluator: Evaluator, space: Sequence[Candidate]) -> bool:
    """Whether any candidate fits. Those with the smallest memory bound are tried first."""
    possible = []
    for candidate in space:
        bound = evaluator.bound(candidate)
        if bound is not None and not evaluator.is_too_large(candidate, bound):
            possible.append((bound.gpu_bytes, candidate.number, candidate))
    for start in range(0, len(possible), 4):
        wave = [
            candidate for *_, candidate in sorted(possible, key=lambda entry: entry[:2])[start : start + 4]
        ]
        if any(evaluator.fits(memory) for memory in evaluator.memory(wave)):
            return True
    return False


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 if 1 does not. A number that zsim refuses, e.g. as too large, does not
    fit.
    """

    def is_too_much(count: int) -> bool:
        try:
            return not fits(count)
        except ZsimError:
            return True

    return (least_number(is_too_much, 1, 2 * _MAXIMUM) or 2 * _MAXIMUM) - 1


def _layers(base: Base) -> tuple[str, int]:
    model = base.job.experiment.model
    if base.job.model.captured is not None:
        raise InputError(
            f"model '{base.job.model.name}': was captured from a torch module, whose number of layers zsim "
            "cannot change; expected a preset or config.json"
        )
    assert not isinstance(model, ModelSpec), "one that is no file was captured"
    config = model if isinstance(model, Mapping) else read_model_config(model)[0]
    for key in _LAYER_KEYS:
        if isinstance(config.get(key), int):
            return key, config[key]
    raise InputError(f"model '{base.job.model.name}': its config.json has no {', '.join(_LAYER_KEYS)}")


_CLOSE = 1.03  # a second structure within this ratio of the best is refined too
_FEW = 3  # the best loss is chosen for at least this many, however few results are asked for
LONGEST = 64  # micro-batches up to which a step is simulated in full for verification


@dataclass(frozen=True)
class VerifiedSpace:
    """The results of searching a space."""

    space: Space
    search: SearchResult
    best: list[CandidateResult]
    """The best results in order, the first simulated in full."""
    measured: list[CandidateResult]
    """All simulated configurations."""

    @property
    def may_run_out(self) -> bool:
        """Whether torch may not find room even for the best result, and hence for any of them."""
        return bool(self.best) and self.best[0].may_run_out


@dataclass(frozen=True)
class Verifier:
    """How to search spaces."""

    evaluator: Evaluator
    keep: Sequence[str]
    count: int
    start: Candidate
    """The experiment's own configuration."""
    is_compared: bool
    """Whether that configuration is ranked among the results."""
    budget: int | None = None
    """As in `search`."""

    def verify_best(self, space: Space) -> VerifiedSpace:
        """The results of the space, or of the first `fallback` whose best result does not run out of memory.
        If there is none, the results of `space`, with a remark on it.
        """
        first = verified = self.verify(space)
        while verified.may_run_out:
            fallback = verified.space.fallback()
            if fallback is None:
                remark = f"{space.remark}, by their tensors alone: torch's allocator may find no room"
                return replace(first, space=replace(space, remark=remark if space.remark else ""))
            verified = self.verify(fallback)
        return verified

    def verify(self, space: Space) -> VerifiedSpace:
        """The best results that fit, the first of them also in a simulation of the full step. See [Note: only
        the whole step shows it]. The evaluator remembers those that run out of memory, so a second search
        ranks them last.
        """
        search_result = self._search(space)
        compared: list[CandidateResult] = []
        if self.is_compared:
            start_result, _ = simulate_start(self.evaluator, self.start)
            compared = [] if start_result is None else [start_result]
        measured = list(search_result.measured)
        best = self._verify_first([*self._refine(search_result, space, measured), *compared], space)
        while best and best[0].may_run_out and search_result.best and not search_result.best[0].may_run_out:
            self._verify_first(search_result.best, space)
            search_result = self._search(space)
            measured += [
                m
                for m in search_result.measured
                if m.candidate not in [result.candidate for result in measured]
            ]
            best = self._verify_first(
                [*self._choose_losses(search_result, space, measured), *compared], space
            )
        return VerifiedSpace(space, search_result, self._drop_loss_variants(best), [*measured, *compared])

    def _search(self, space: Space) -> SearchResult:
        first, replacements = split_losses(space.candidates)
        return search(
            self.evaluator, first, objective=space.objective, count=self.count, replacements=replacements,
            budget=self.budget,
        )  # fmt: skip

    def _choose_losses(
        self, search_result: SearchResult, space: Space, measured: list[CandidateResult]
    ) -> list[CandidateResult]:
        best_few = _rank(search_result.measured, space)[: max(self.count, _FEW)]
        improved, seen = choose_loss(self.evaluator, best_few, space.objective)
        measured += seen
        return _rank(improved, space)

    def _drop_loss_variants(self, ranked: Sequence[CandidateResult]) -> list[CandidateResult]:
        """The first of each set of configurations that differ only in the loss."""
        unique_results: dict[str, CandidateResult] = {}
        for measured in ranked:
            is_start = measured.candidate is self.start or (
                measured.candidate.base is self.start.base
                and set(differing_axes(self.start, measured.candidate)) <= {LOSSES.name}
            )
            unique_results.setdefault("given" if is_start else measured.candidate.key((LOSS,)), measured)
        return list(unique_results.values())

    def _refine(
        self, search_result: SearchResult, space: Space, measured: list[CandidateResult]
    ) -> list[CandidateResult]:
        best = self._choose_losses(search_result, space, measured)
        values = [m.objective_value(space.objective) for m in best]
        for index, start in enumerate(best[:2]):
            if values[index] > _CLOSE * values[0]:
                continue
            details = tuning_of(start.candidate.base.kind).details
            if not self.is_compared:  # the size that the goal decided holds for the kernels as they are
                details = tuple(axis for axis in details if not axis.changes_kernels)
            improved, seen = refine(
                self.evaluator, start, axes=details, objective=space.objective, keep=self.keep
            )
            measured += seen[1:]
            best[index] = improved
        return best

    def _verify_first(self, best: Sequence[CandidateResult], space: Space) -> list[CandidateResult]:
        """`best` ranked, with the first one verified. If verification shows that it may run out of memory, it
        is ranked last and the next is verified.
        """
        ranked = _drop_repeated_start(_rank(best, space), self.start)
        for _ in best:
            if not ranked:
                break
            ranked[0] = self.evaluator.verify(ranked[0], LONGEST)
            if not ranked[0].may_run_out:
                break
            ranked = _rank(ranked, space)
        return ranked


def simulate_start(
    evaluator: Evaluator, candidate: Candidate
) -> tuple[CandidateResult | None, MemoryBounds | None]:
    """(the experiment's own configuration simulated, if it fits, whatever the headroom, its memory)."""
    memory = evaluator.memory([candidate])[0]
    if memory is None or not memory.fits:
        return None, memory
    return evaluator.simulate([candidate])[0], memory


def start_verdict(evaluator: Evaluator, candidate: Candidate) -> Verdict | None:
    """The verdict on the experiment's own configuration, as a run of it has. None where it has none."""
    (result,) = evaluator.simulate([candidate])
    return None if result is None else verdict_of_row(result.row)


def _rank(best: Sequence[CandidateResult], space: Space) -> list[CandidateResult]:
    return sorted(best, key=lambda m: (m.objective_value(space.objective), m.candidate.number))


def _drop_repeated_start(ranked: Sequence[CandidateResult], start: Candidate) -> list[CandidateResult]:
    """The results without repetitions of the configuration `start`."""
    unique_results: list[CandidateResult] = []
    has_start = False
    for measured in ranked:
        candidate = measured.candidate
        is_start = candidate is start or (
            candidate.base is start.base and not differing_axes(start, candidate)
        )
        if not (is_start and has_start):
            unique_results.append(measured)
        has_start = has_start or is_start
    return unique_results
