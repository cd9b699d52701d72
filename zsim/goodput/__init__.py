"""A training run over days: what checkpoints, failures and recovery make of a step's time."""
