"""What exists and what is asked for."""
