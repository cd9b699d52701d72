"""Passes over a finished plan: one thread, two steps, hardware queues."""
