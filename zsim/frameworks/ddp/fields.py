"""The settings of DDP on the page."""

from __future__ import annotations

from zsim.ui.field import Field
from zsim.ui.framework import FrameworkFields


class DdpFields(FrameworkFields):
    """The size of a bucket."""

    label = "DDP"
    position = 4
    fields = (Field("strategy.bucket_cap_mb", "Bucket", "MiB"),)


FIELDS = DdpFields()
