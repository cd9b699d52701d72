"""Recorded runs, one reader per format."""
