"""Work (FLOPs, bytes, rounds) and its seconds on idle hardware: pure functions."""
