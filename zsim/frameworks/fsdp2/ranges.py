"""The ranges that torch's `fully_shard` writes into a profile: `FSDP::all_gather (layers.3)`."""

from __future__ import annotations

import re

from zsim.trace.readers.kineto.file import UnitRanges

_UNIT = re.compile(r"^FSDP::\S+(?: for (?P<next>\S+)| \((?P<unit>.*)\))")
_ROOT = frozenset(
    f"FSDP::{name}"
    for name in (
        "pre_forward", "post_forward", "pre_backward", "all_gather", "all_gather_copy_out",
        "post_backward_accumulate", "post_backward_reshard", "post_backward_reduce",
        "post_backward_rs_wait",
    )
)  # fmt: skip
RANGES = UnitRanges(_UNIT, _ROOT)
