"""Readers and writers of other programs' files."""
