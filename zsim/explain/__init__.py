"""From an outcome of the engine to a report."""
