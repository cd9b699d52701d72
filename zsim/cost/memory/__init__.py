"""Bytes that autograd and optimizers keep."""
