"""Regression checks against recorded and published runs."""
