"""One run against another: calls, clock, memory, verdict."""
