"""Programs of recorded runs, to be run again."""
