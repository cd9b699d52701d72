"""Jitter: steps of random length, drawn from a seed."""
