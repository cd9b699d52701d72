"""Strategies: how states are sharded; and the training values that plans are made from."""
