"""verl, which drives loops of reinforcement learning."""

ROLES = {"workflow": "workflow", "kernels": "kernels"}  # see zsim.specs.strategy.registry
