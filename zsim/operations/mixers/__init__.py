"""Mixers of tokens other than attention: recurrences computed in chunks, and short convolutions."""
