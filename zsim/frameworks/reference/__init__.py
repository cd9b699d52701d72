"""ZeRO as its paper describes it, which the other frameworks are checked against."""

ROLES = {  # the module of each role: see zsim.specs.strategy.registry
    "framework": "settings",
    "resolver": "resolver",
    "training": "resolver",
    "hooks": "schedule",
    "report": "resolver",
    "tune": "studies",
    "checkpoint": "studies",
    "fields": "studies",
}
