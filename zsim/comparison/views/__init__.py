"""Comparisons as people read them."""
