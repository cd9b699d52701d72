"""DDP's part in `[training]`."""

from __future__ import annotations

from zsim.frameworks.ddp.settings import DdpConfig, DdpTable
from zsim.specs.experiment.training.framework_training import FrameworkTraining


class DdpTraining(FrameworkTraining[DdpTable, DdpConfig]):
    """Weights are fp32 under torch.autocast, and ranks may differ."""

    title = "DDP"
    is_under_autocast = True
    has_stored_dtype = True
    has_uneven_batches = True
    merging_strategy = "'ddp'"

    def synchronized_replicas(
        self, table: DdpTable, config: DdpConfig | None, replicas: int, nodes: int
    ) -> int:
        return 1 if table.no_sync else replicas


TRAINING = DdpTraining()
