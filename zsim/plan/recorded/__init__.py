"""Plans of recorded runs."""
