from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from validation.published.shipped import format_validated_table
from zsim.validated.features import binding_of
from zsim.validated.runs import ValidatedRun, read_validated


def test_a_table_reads_back_as_it_was_written(make_run: Callable[..., ValidatedRun]) -> None:
    runs = (make_run("one", 0.12345, fabric="", training='bf16, "full", none'), make_run("two", -0.5))
    assert read_validated(format_validated_table(runs)) == runs


def test_a_table_of_other_columns_is_not_read(make_run: Callable[..., ValidatedRun]) -> None:
    with pytest.raises(ValueError, match="other columns"):
        read_validated("row_id,source\na,b\n")


@pytest.mark.parametrize(
    ("shares", "retries", "binding"),
    [
        ({"compute": 0.9, "exposed_communication": 0.08}, 0, "kernels"),
        ({"compute": 0.8, "exposed_communication": 0.2}, 0, "the network"),
        ({"compute": 0.8, "exposed_communication": 0.12, "offload_stall": 0.06}, 0, "offloading"),
        ({"compute": 0.5, "host_bound": 0.5}, 0, "the host"),
        ({"compute": 0.5, "host_bound": 0.5}, 0.25, "the allocator"),
    ],
)
def test_what_binds_a_step(shares: dict[str, Any], retries: float, binding: str) -> None:
    assert binding_of(shares, retries) == binding
