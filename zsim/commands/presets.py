"""`zsim presets`: the models and clusters that ship with zsim."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence


def presets() -> None:
    """The models and clusters that ship with zsim."""
    from zsim.specs.presets import model_preset_names, topology_preset_names
    from zsim.study.published.regimes import without_a_run

    print("models:   " + _wrapped(model_preset_names()))
    print("clusters: " + _wrapped(topology_preset_names()))
    print("\nNo published run says how far zsim is off on these:")
    for what, names in without_a_run().items():
        print(f"{what + ':':<12}" + _wrapped(names, 12))


def _wrapped(names: Sequence[str], indent: int = 10) -> str:
    return ("\n" + " " * indent).join(textwrap.wrap(", ".join(names), 78 - indent, break_on_hyphens=False))
