"""Traces of steps, simulated or recorded."""
