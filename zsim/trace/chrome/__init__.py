"""Traces as Perfetto and chrome://tracing show them."""
