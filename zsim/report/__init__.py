"""The report of a step: breakdown, memory, traffic, critical path, and their views."""
