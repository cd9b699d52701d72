"""Readers of recorded runs, one per format."""
