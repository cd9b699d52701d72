"""Readers and writers of other programs' hardware descriptions."""
