"""How much and how long on idle hardware: pure functions."""
