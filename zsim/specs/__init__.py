"""Specifications: hardware, topologies, models, strategies and experiments, as files describe them."""
