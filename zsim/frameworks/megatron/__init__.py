"""Megatron-Core's DistributedDataParallel and distributed optimizer."""

ROLES = {  # the module of each role: see zsim.specs.strategy.registry
    "framework": "settings.config",
    "resolver": "resolver",
    "training": "training",
    "hooks": "hooks",
    "report": "resolver",
    "kernels": "kernels",
    "model_families": "model_families",
    "tune": "studies",
    "bounds": "studies",
    "checkpoint": "studies",
    "fields": "studies",
    "refusals": "settings.config",
}
