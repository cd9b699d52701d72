"""Accelerate's YAML."""
