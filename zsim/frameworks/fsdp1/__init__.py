"""FSDP1: torch's FullyShardedDataParallel."""

ROLES = {  # the module of each role: see zsim.specs.strategy.registry
    "framework": "settings",
    "resolver": "resolver",
    "training": "resolver",
    "hooks": "schedule",
    "report": "resolver",
    "tune": "studies",
    "bounds": "studies",
    "checkpoint": "studies",
    "fields": "studies",
}
