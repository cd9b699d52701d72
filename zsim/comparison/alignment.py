"""Alignment of the calls of two sequences, when some were dropped, added, changed or swapped.

The longest common subsequence comes first (Myers, "An O(ND) Difference Algorithm and Its Variations", 1986),
so one lost call is one difference and does not affect the calls after it. The remaining calls are then
matched. The same call a few positions away was moved, calls between the same matches that differ in a field
or two were changed, and the others are on one side only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

MAX_EDITS = 1_000  # maximum; two sequences with more edits are unrelated
_MAX_DISTANCE = 16  # maximum of places by which a call may have moved and still count as the same


@dataclass(frozen=True, slots=True)
class Alignment:
    """Index pairs (first, second), each list in order."""

    same: tuple[tuple[int, int], ...]
    """Pairs that agree."""
    changed: tuple[tuple[int, int], ...]
    """Counterparts that differ."""
    moved: tuple[tuple[int, int], ...]
    """Pairs that agree but are at different positions."""
    only_first: tuple[int, ...]
    """Entries without a counterpart."""
    only_second: tuple[int, ...]
    """Entries without a counterpart."""
    is_complete: bool = True
    """False where the sequences differ so much that only their ends were aligned."""


def align(
    first: Sequence[Hashable], second: Sequence[Hashable], likeness: Callable[[int, int], float] | None = None
) -> Alignment:
    """Align two sequences of keys.

    `likeness(i, j)` in 0..1 is the similarity of two unequal entries. From 0.5 on, entries between the same
    matches count as one changed entry.
    """
    matches, is_complete = _find_matches(first, second)
    gaps = _gaps(matches, len(first), len(second))
    moved = _find_moves(gaps, first, second)
    used_first, used_second = {i for i, _ in moved}, {j for _, j in moved}
    changed: list[tuple[int, int]] = []
    if likeness is not None:
        for left, right in gaps:
            free_left = [i for i in left if i not in used_first]
            free_right = [j for j in right if j not in used_second]
            changed += _pair_changes(free_left, free_right, likeness)
    used_first |= {i for i, _ in changed}
    used_second |= {j for _, j in changed}
    return Alignment(
        same=tuple(matches),
        changed=tuple(changed),
        moved=tuple(moved),
        only_first=tuple(i for left, _ in gaps for i in left if i not in used_first),
        only_second=tuple(j for _, right in gaps for j in right if j not in used_second),
        is_complete=is_complete,
    )


def _find_matches(
    first: Sequence[Hashable], second: Sequence[Hashable]
) -> tuple[list[tuple[int, int]], bool]:
    """Pairs of a longest common subsequence, and whether it is complete within `MAX_EDITS`."""
    start, limit = 0, min(len(first), len(second))
    while start < limit and first[start] == second[start]:
        start += 1
    tail = 0
    while tail < limit - start and first[-1 - tail] == second[-1 - tail]:
        tail += 1
    head = [(i, i) for i in range(start)]
    end = [(len(first) - k, len(second) - k) for k in range(tail, 0, -1)]
    left, right = first[start : len(first) - tail], second[start : len(second) - tail]
    middle = _shortest_edit(left, right) if left and right else []
    if middle is None:
        return head + end, False
    return head + [(i + start, j + start) for i, j in middle] + end, True


def _shortest_edit(first: Sequence[Hashable], second: Sequence[Hashable]) -> list[tuple[int, int]] | None:
    """Matches of a shortest edit by Myers' greedy search. None where more than `MAX_EDITS` are needed.

    `reach[k]` is the index in `first` that diagonal k = i - j reaches with the present number of edits.
    `history[d]` is the part of `reach` that round d starts from.
    """
    rows, columns = len(first), len(second)
    max_edits = min(rows + columns, MAX_EDITS)
    zero = max_edits + 1  # index of diagonal 0
    reach = array("i", [0]) * (2 * max_edits + 3)
    history: list[array[int]] = []
    for edits in range(max_edits + 1):
        history.append(reach[zero - edits - 1 : zero + edits + 2])
        for diagonal in range(-edits, edits + 1, 2):
            below, left = reach[zero + diagonal + 1], reach[zero + diagonal - 1]
            i = below if _is_from_above(diagonal, edits, left, below) else left + 1
            j = i - diagonal
            while i < rows and j < columns and first[i] == second[j]:
                i, j = i + 1, j + 1
            reach[zero + diagonal] = i
            if i >= rows and j >= columns:
                return _backtrack(history, rows, columns)
    return None


def _is_from_above(diagonal: int, edits: int, left: int, above: int) -> bool:
    """Whether the furthest path on a diagonal comes down from the diagonal above, not right from the one
    before."""
    return diagonal == -edits or (diagonal != edits and left < above)


def _backtrack(history: list[array[int]], rows: int, columns: int) -> list[tuple[int, int]]:
    """The matches on the path that ended at (rows, columns), in order."""
    matches: list[tuple[int, int]] = []
    i, j = rows, columns
    for edits in range(len(history) - 1, 0, -1):
        reach, zero, diagonal = history[edits], edits + 1, i - j
        left, above = reach[zero + diagonal - 1], reach[zero + diagonal + 1]
        is_down = _is_from_above(diagonal, edits, left, above)
        before_i = above if is_down else left
        before_j = before_i - (diagonal + 1 if is_down else diagonal - 1)
        while i > before_i and j > before_j:
            i, j = i - 1, j - 1
            matches.append((i, j))
        i, j = before_i, before_j
    matches += [(k, k) for k in range(i - 1, -1, -1)]
    return matches[::-1]


_Gap = tuple[list[int], list[int]]


def _gaps(matches: list[tuple[int, int]], rows: int, columns: int) -> list[_Gap]:
    """Entries between adjacent matches on either side, where there are any."""
    gaps: list[_Gap] = []
    last_i = last_j = -1
    for i, j in [*matches, (rows, columns)]:
        if i - last_i > 1 or j - last_j > 1:
            gaps.append((list(range(last_i + 1, i)), list(range(last_j + 1, j))))
        last_i, last_j = i, j
    return gaps


def _find_moves(
    gaps: list[_Gap], first: Sequence[Hashable], second: Sequence[Hashable]
) -> list[tuple[int, int]]:
    """Pairs of equal entries that are unmatched on both sides, at most `_MAX_DISTANCE` positions apart."""
    waiting: dict[Hashable, list[tuple[int, int]]] = {}
    for number, (_, right) in enumerate(gaps):
        for j in right:
            waiting.setdefault(second[j], []).append((number, j))
    moves = []
    for left, _ in gaps:
        for i in left:
            candidates = [entry for entry in waiting.get(first[i], []) if abs(entry[1] - i) <= _MAX_DISTANCE]
            if candidates:
                nearest = min(candidates, key=lambda entry: abs(entry[1] - i))
                waiting[first[i]].remove(nearest)
                moves.append((i, nearest[1]))
    return moves


def _pair_changes(
    left: list[int], right: list[int], likeness: Callable[[int, int], float]
) -> list[tuple[int, int]]:
    """Pairs in order. Each entry of `left` gets the most similar remaining entry of `right`."""
    pairs: list[tuple[int, int]] = []
    next_index = 0
    for i in left:
        best = max(
            range(next_index, len(right)), key=lambda k: (likeness(i, right[k]), -k), default=None
        )  # the earliest among equals
        if best is not None and likeness(i, right[best]) >= 0.5:
            pairs.append((i, right[best]))
            next_index = best + 1
    return pairs
