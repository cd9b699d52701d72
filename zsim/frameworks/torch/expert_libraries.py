"""Layers of routed experts that are sharded by torch: torchtitan's, and KempnerForge's.

Sources: torchtitan 0.2.2 `models/moe/moe.py` and `distributed/expert_parallel.py`, and
`kempnerforge/model/moe.py` at 5666d0d1.
"""

from __future__ import annotations

from zsim.specs.strategy.expert_library import ExpertLibrary

TORCHTITAN = ExpertLibrary(
    name="torchtitan",
    title="torchtitan",
    owner="torchtitan",
    dispatch="rows",
    splits_with_products=True,
    separates_gate=True,
)
KEMPNERFORGE = ExpertLibrary(
    name="kempnerforge",
    title="KempnerForge",
    owner="KempnerForge",
    pads_to_fullest=True,
    waits_for_counts=True,
)
