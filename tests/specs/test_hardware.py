"""The schema of hardware tables: what must be there and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from zsim.specs.cluster.cluster import NodeLink
from zsim.specs.cluster.files import load_cluster, load_gpu
from zsim.specs.cluster.gpu import DeviceMemory, GemmEfficiency, PeakRates
from zsim.specs.lazy_model import EVIDENCE_ORDER, UNSAID, Table
from zsim.specs.presets import gpu_preset_names, topology_preset_names

_ORIGIN: dict[str, Any] = {"source": "a data sheet, table 1", "evidence": "data sheet"}


def test_a_number_without_a_source_is_assumed() -> None:
    memory = DeviceMemory.model_validate({"capacity": "80 GB", "bandwidth": "2 TB/s"})
    assert (memory.source, memory.evidence) == ("the file does not say", "assumed")


def _unsourced(value: Any, where: str) -> Iterator[str]:
    """Tables below `value` that do not say in ten characters or more where their numbers come from."""
    if isinstance(value, Table) and ("evidence" not in value.model_fields_set or UNSAID in value.source):
        yield where
    if isinstance(value, Table) and len(value.source) < 10:
        yield where
    if isinstance(value, BaseModel):
        for name in value.model_fields_set:
            yield from _unsourced(getattr(value, name), f"{where}.{name}")


@pytest.mark.parametrize("name", [*gpu_preset_names(), *topology_preset_names()])
def test_every_table_that_ships_says_where_its_numbers_come_from(name: str) -> None:
    is_gpu = name in gpu_preset_names()
    found = load_gpu(name) if is_gpu else load_cluster(name)
    assert list(_unsourced(found, name)) == []


def test_a_table_without_a_source_would_be_found() -> None:
    memory = DeviceMemory.model_validate({"capacity": "80 GB", "bandwidth": "2 TB/s"})
    gpu = load_gpu("h100-sxm-80gb").model_copy(update={"memory": memory})
    assert "h100.memory" in set(_unsourced(gpu, "h100"))


def test_an_evidence_grade_is_one_of_four() -> None:
    assert EVIDENCE_ORDER == ("measured", "calibrated", "data sheet", "assumed")
    with pytest.raises(ValidationError, match="'measured', 'calibrated', 'data sheet' or 'assumed'"):
        NodeLink.model_validate({"kind": "none", "source": "a data sheet, table 1", "evidence": "guessed"})


@pytest.mark.parametrize("value", [0.0, 1.6, -0.5, float("nan"), float("inf")])
def test_products_reach_something_and_at_most_what_a_higher_clock_gives(value: float) -> None:
    """A board may run above the data sheet's boost clock, but not half as fast again."""
    with pytest.raises(ValidationError, match="max_fraction"):
        GemmEfficiency.model_validate(
            {**_ORIGIN, "max_fraction": value, "k_half": 128, "tile_m": 128, "tile_n": 256}
        )


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_length_of_half_rate_is_finite_and_not_negative(value: float) -> None:
    with pytest.raises(ValidationError, match="k_half"):
        GemmEfficiency.model_validate(
            {**_ORIGIN, "max_fraction": 0.8, "k_half": value, "tile_m": 128, "tile_n": 256}
        )


def test_a_type_the_gpu_lacks_is_none_and_not_zero() -> None:
    peak = PeakRates.model_validate({**_ORIGIN, "fp16": "125 TFLOP/s", "fp32": "15.7 TFLOP/s"})
    assert peak.fp16 == 125e12
    assert peak.bf16 is None
    assert peak.fp8 is None


def test_hardware_cannot_be_changed_after_loading() -> None:
    link = NodeLink.model_validate({**_ORIGIN, "kind": "switch", "bandwidth": "450 GB/s"})
    with pytest.raises(ValidationError, match="frozen"):
        link.bandwidth = 1.0  # type: ignore[misc]
