from __future__ import annotations

from typing import Any

import pytest

from validation.published.cluster import network_of
from validation.published.table import PublishedRun


@pytest.mark.parametrize(
    ("source", "cells", "network"),
    [
        ("mine", {"inter_desc": "8x400Gb/s NDR IB (Azure ND96isr_H100_v5)"}, "InfiniBand"),
        ("mine", {"inter_desc": "AWS EFA 400Gb/s per node"}, "EFA"),
        ("mine", {}, ""),
        ("mosaic-2023-02", {"gpu": "A100-SXM4-80GB", "inter_gbps_per_gpu": "200"}, "RoCE"),
        ("mosaic-2024-01", {"gpu": "H100-SXM5-80GB", "inter_gbps_per_gpu": "400"}, ""),
        ("azure-qwen-fsdp", {"inter_gbps_per_gpu": "400"}, "InfiniBand"),
        ("azure-qwen-fsdp", {"inter_gbps_per_gpu": "3.2"}, "Ethernet"),
    ],
)
def test_the_network_is_the_rows_own_or_what_is_known_of_its_source(
    source: str, cells: dict[str, Any], network: str
) -> None:
    assert network_of(PublishedRun("r", source, "report", cells, "here")) == network
