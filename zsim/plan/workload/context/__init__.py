"""Attention over split sequences: its kernels, and the collectives and messages between them."""
