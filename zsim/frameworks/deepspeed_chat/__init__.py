"""DeepSpeed-Chat, which drives loops of reinforcement learning."""

ROLES = {"workflow": "workflow"}  # see zsim.specs.strategy.registry
