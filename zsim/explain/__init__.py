"""An outcome of the engine, as a report."""
