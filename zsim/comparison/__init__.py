"""Comparison of two runs: calls, clock, memory, verdict."""
