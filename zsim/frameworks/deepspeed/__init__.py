"""DeepSpeed: engine, ZeRO stages, ZeRO++ and MiCS."""

ROLES = {  # the module of each role: see zsim.specs.strategy.registry
    "framework": "settings.config",
    "resolver": "resolver",
    "training": "training",
    "hooks": "hooks",
    "report": "resolver",
    "config_file": "settings.reader",
    "tune": "studies",
    "bounds": "studies",
    "checkpoint": "studies",
    "fields": "studies",
    "logs": "logs",
    "refusals": "settings.unsimulated",
}
