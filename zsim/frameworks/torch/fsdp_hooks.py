"""The common part of the hooks of torch's two FSDPs in a plan."""

from __future__ import annotations

from typing import TypeVar

from zsim.frameworks.fsdp1.settings import Fsdp1Config
from zsim.frameworks.fsdp2.settings import Fsdp2Config
from zsim.plan.framework_hooks import FrameworkHooks
from zsim.plan.ops import Device
from zsim.plan.shared.originals import FrozenStorage
from zsim.specs.strategy.training import TrainingConfig

Config = TypeVar("Config", Fsdp1Config, Fsdp2Config)


class FsdpHooks(FrameworkHooks[Config]):
    """Parameters are sharded in each replica, and offloaded to the host where that is asked for."""

    originals_note = "PEFT's frozen originals of modules_to_save are in memory, but not in what FSDP gathers"

    def frozen_storage(self, config: Config, training: TrainingConfig, ranks: int) -> FrozenStorage:
        device: Device = "host" if config.cpu_offload else "gpu"
        return FrozenStorage(training.stored_dtype, ranks // config.replicate, device)

    def is_offloaded(self, config: Config) -> bool:
        return config.cpu_offload
