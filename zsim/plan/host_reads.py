"""Reading a number from the GPU: it is reduced over groups, and the host waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from zsim.dtypes import DTYPE_BYTES
from zsim.plan.builder import COMPUTE, PlanBuilder


def read_scalar(
    builder: PlanBuilder,
    name: str,
    dtype: str,
    groups: Sequence[str],
    *,
    count: int = 1,
    later_groups: Sequence[str] = (),
) -> None:
    """Issue `.item()` of a scalar. Before it the scalar is all-reduced `count` times over `groups`, one after
    the other, and then once over each of `later_groups`. Groups of one rank reduce nothing.
    """
    size, reduction = DTYPE_BYTES[dtype], f"all_reduce {name}"
    reducing_groups = [group for group in groups if builder.groups[group].size > 1]
    for group in [
        *reducing_groups * count,
        *(group for group in later_groups if builder.groups[group].size > 1),
    ]:
        builder.collective("all_reduce", size, dtype, group, stream=COMPUTE, name=reduction)
    builder.host_wait(builder.record(COMPUTE))
    builder.host(f"read {name}")
