"""The best of a space, refined, and simulated whole: what torch may then have no room for comes behind.

# [Note: only the whole step shows it]
Of a step of many micro-batches a few are simulated, which is enough for its time and its tensors, but not for
where torch's allocator finds room: the blocks of later micro-batches lie among those of earlier ones. So the
first is simulated whole, and where that runs out, the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from zsim.study.tune.axes import LOSSES
from zsim.study.tune.candidates import Candidate
from zsim.study.tune.evaluate import Evaluator, Measured, MemoryBounds
from zsim.study.tune.explain import differing_axes
from zsim.study.tune.goals import Space
from zsim.study.tune.losses import but_for_loss, by_loss, with_best_loss
from zsim.study.tune.refine import refine
from zsim.study.tune.search import SearchResult, search

_CLOSE = 1.03  # another structure within this of the best is refined too
_FEW = 3  # at least so many of the best get the loss that suits them, however few are asked for
_LONGEST = 64  # micro-batches of a step that is simulated whole, to verify it


@dataclass(frozen=True)
class Looked:
    """`best` first, of those the first simulated whole; `measured` are all simulated configurations."""

    space: Space
    found: SearchResult
    best: list[Measured]
    measured: list[Measured]

    @property
    def may_run_out(self) -> bool:
        """Whether torch may have no room even for the best, and so for any of them."""
        return bool(self.best) and self.best[0].may_run_out


@dataclass(frozen=True)
class Look:
    """How spaces are looked at: `given` is the experiment as it was, ranked with the others where it
    `is_compared`."""

    evaluator: Evaluator
    keep: Sequence[str]
    count: int
    given: Candidate
    is_compared: bool

    def at_best(self, space: Space) -> Looked:
        """The space itself, or the first of those it names otherwise where torch surely has room; where it
        nowhere has, the space itself, which then says so."""
        first = looked = self.at(space)
        while looked.may_run_out:
            other = looked.space.otherwise()
            if other is None:
                unsure = f"{space.settled}, by their tensors alone: torch's allocator may find no room"
                return replace(first, space=replace(space, settled=unsure if space.settled else ""))
            looked = self.at(other)
        return looked

    def at(self, space: Space) -> Looked:
        """The best that fit, also by a simulation of the whole step; see [Note: only the whole step shows
        it]. What is found to run out is known to the evaluator, so that a second search goes past it."""
        found = self._searched(space)
        compared: list[Measured] = []
        if self.is_compared:
            given, _ = measured_given(self.evaluator, self.given)
            compared = [] if given is None else [given]
        measured = list(found.measured)
        best = self._verified([*self._refined(found, space, measured), *compared], space)
        while best and best[0].may_run_out and found.best and not found.best[0].may_run_out:
            self._verified(found.best, space)
            found = self._searched(space)
            measured += [m for m in found.measured if m.candidate not in [one.candidate for one in measured]]
            best = self._verified([*self._with_losses(found, space, measured), *compared], space)
        return Looked(space, found, self._one_of_each(best), [*measured, *compared])

    def _searched(self, space: Space) -> SearchResult:
        first, instead = by_loss(space.candidates)
        return search(self.evaluator, first, objective=space.objective, count=self.count, instead=instead)

    def _with_losses(self, found: SearchResult, space: Space, measured: list[Measured]) -> list[Measured]:
        few = _ranked(found.measured, space)[: max(self.count, _FEW)]
        better, seen = with_best_loss(self.evaluator, few, space.objective)
        measured += seen
        return _ranked(better, space)

    def _one_of_each(self, ranked: Sequence[Measured]) -> list[Measured]:
        """Of those that differ in nothing but the loss, the first."""
        found: dict[str, Measured] = {}
        for measured in ranked:
            is_given = measured.candidate is self.given or _is_but_for_loss(self.given, measured.candidate)
            found.setdefault("given" if is_given else but_for_loss(measured.candidate), measured)
        return list(found.values())

    def _refined(self, found: SearchResult, space: Space, measured: list[Measured]) -> list[Measured]:
        best = self._with_losses(found, space, measured)
        worths = [m.worth(space.objective) for m in best]
        for place, start in enumerate(best[:2]):
            if worths[place] > _CLOSE * worths[0]:
                continue
            better, seen = refine(self.evaluator, start, objective=space.objective, keep=self.keep)
            measured += seen[1:]
            best[place] = better
        return best

    def _verified(self, best: Sequence[Measured], space: Space) -> list[Measured]:
        """Ranked: the first is verified, and goes behind what fits where it then may run out."""
        ranked = _distinct(_ranked(best, space), self.given)
        for _ in best:
            if not ranked:
                break
            ranked[0] = self.evaluator.verified(ranked[0], _LONGEST)
            if not ranked[0].may_run_out:
                break
            ranked = _ranked(ranked, space)
        return ranked


def _is_but_for_loss(given: Candidate, candidate: Candidate) -> bool:
    """Whether a candidate is the given configuration, whatever its loss."""
    return candidate.base is given.base and set(differing_axes(given, candidate)) <= {LOSSES.name}


def measured_given(evaluator: Evaluator, candidate: Candidate) -> tuple[Measured | None, MemoryBounds | None]:
    """The experiment as it is: simulated where it fits, whatever the headroom."""
    memory = evaluator.memory([candidate])[0]
    if memory is None or not memory.fits:
        return None, memory
    return evaluator.simulate([candidate])[0], memory


def _ranked(best: Sequence[Measured], space: Space) -> list[Measured]:
    return sorted(best, key=lambda m: (m.worth(space.objective), m.candidate.number))


def _distinct(ranked: Sequence[Measured], given: Candidate) -> list[Measured]:
    """Without those that are the given configuration over again."""
    found: list[Measured] = []
    has_given = False
    for measured in ranked:
        candidate = measured.candidate
        is_given = candidate is given or (
            candidate.base is given.base and not differing_axes(given, candidate)
        )
        if not (is_given and has_given):
            found.append(measured)
        has_given = has_given or is_given
    return found
