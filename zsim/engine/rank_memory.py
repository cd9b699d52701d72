"""The memory in which an executor's ranks keep the state of each op.

# [Note: ranks side by side]
Equal ranks reach an op at the same instant, one right after the other. So their state of one op lies side by
side in memory for all ranks that run a program, instead of op by op for each rank. Then one line of a
processor's cache holds several ranks, where otherwise each would have to be fetched from memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import MutableSequence, Sequence

import numpy as np

from zsim.engine.priced_program import PricedProgram


class RankMemory:
    """The memory of the ranks that run `programs`, in huge pages."""

    def __init__(self, programs: Sequence[PricedProgram]) -> None:
        self._num_ranks = Counter(map(id, programs))
        self._num_allocated: Counter[int] = Counter()
        programs_by_id = {id(program): program for program in programs}.items()
        self._times = {
            key: np.full(3 * program.num_ops * self._num_ranks[key], np.nan).data.cast("B").cast("d")
            for key, program in programs_by_id
        }
        self._pending = {
            key: np.repeat(np.array(program.pending, dtype=np.uint8), self._num_ranks[key]).data
            for key, program in programs_by_id
            if self._num_ranks[key] > 1 and max(program.pending, default=0) < 256
        }

    def allocate_rank(
        self, program: PricedProgram
    ) -> tuple[MutableSequence[int] | memoryview[int], list[memoryview[float]]]:
        """The memory of the next rank that runs `program`.

        By op, it holds how many ops the op still waits for, and the times at which it is issued, starts and
        ends. No time is known yet (not a number).
        """
        key, num = id(program), program.num_ops
        count, index = self._num_ranks[key], self._num_allocated[key]
        self._num_allocated[key] += 1
        times = self._times[key][index::count]
        shared_pending = self._pending.get(key)
        pending = program.pending[:] if shared_pending is None else shared_pending[index::count]
        return pending, [times[:num], times[num : 2 * num], times[2 * num :]]
