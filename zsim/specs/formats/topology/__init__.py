"""Descriptions of hardware that other programs write."""
