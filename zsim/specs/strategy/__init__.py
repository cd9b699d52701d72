"""Strategies, which shard states, and the training values that plans are made from."""
