"""A wing: measurements in, a hardware file out. It sees the specs and the cost models, never the clock."""
