"""Bytes that modules keep for backward, and the tensors they are allocated in."""
