"""Runs that others measured and what zsim predicted for them: how far its answers are to be trusted."""
