"""Collective algorithms: the bytes each puts on every link."""
