"""Traces in the format of Perfetto and chrome://tracing."""
