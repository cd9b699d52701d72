"""Which pipeline rank holds which stages of the model, in loops or in the shape of a V.

Source: `generate_stage_to_rank_mapping` of torch 2.13 `torch/distributed/pipelining/_utils.py`. Megatron-Core
0.16.1 places chunk j of rank r as a loop does (`core/pipeline_parallel/schedules.py`).
"""

from __future__ import annotations

from zsim.specs.strategy.parallelism import V_SHAPED


def stage_of(schedule: str, ranks: int, rank: int, chunk: int) -> int:
    """The stage that is `rank`'s `chunk`-th, both from 0. It is chunk x ranks + rank in a loop. In a V the
    odd chunks run back, from the last rank to the first.
    """
    is_back = schedule in V_SHAPED and chunk % 2 == 1
    return chunk * ranks + (ranks - 1 - rank if is_back else rank)


def rank_of_stage(schedule: str, ranks: int, stage: int) -> int:
    """The pipeline rank that holds `stage`."""
    chunk, rank = divmod(stage, ranks)
    is_back = schedule in V_SHAPED and chunk % 2 == 1
    return ranks - 1 - rank if is_back else rank


def ranks_of_stages(schedule: str, ranks: int, virtual: int) -> list[int]:
    """The pipeline rank of every stage, in model order."""
    return [rank_of_stage(schedule, ranks, stage) for stage in range(ranks * virtual)]
