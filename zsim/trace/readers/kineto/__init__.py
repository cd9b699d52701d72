"""The profiler of torch."""
