"""Steps of varying length, by a seed."""
