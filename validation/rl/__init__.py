"""Published steps of reinforcement learning and runs of inference engines, predicted."""
