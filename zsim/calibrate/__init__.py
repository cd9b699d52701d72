"""A wing: measurements in, a hardware file out. It uses the specs and the cost models, never the clock."""
