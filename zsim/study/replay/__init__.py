"""Recorded runs, simulated again."""
