"""The kernels that `training.layer_kernels` and `training.cross_entropy` name.

torch's are in `zsim.cost.kernels`. Those of a framework are in the module `kernels` of its folder, in
`LAYER_KERNELS` and `LOSSES`, so another implementation is one more value there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from typing import Any

from zsim.cost.kernels.layer_kernels import LayerKernelSet
from zsim.cost.kernels.losses import LOSSES, LossKernelSet
from zsim.specs.strategy.registry import kinds_with, role_of

_MODULE, _COMPILED = "kernels", LayerKernelSet()


@cache
def layer_kernel_sets() -> Mapping[str, LayerKernelSet]:
    """torch.compile's kernels of layers, and those in the folders of frameworks, by name."""
    return {_COMPILED.name: _COMPILED} | _sets_of_frameworks("LAYER_KERNELS")


@cache
def losses() -> Mapping[str, LossKernelSet]:
    """The implementations of cross-entropy by name, torch's before those in the folders of frameworks."""
    return LOSSES | _sets_of_frameworks("LOSSES")


def _sets_of_frameworks(table: str) -> dict[str, Any]:
    tables: Iterator[Mapping[str, Any]] = (role_of(kind, _MODULE, table, {}) for kind in kinds_with(_MODULE))
    return dict(chain.from_iterable(sets.items() for sets in tables))
