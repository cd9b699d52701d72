"""The report on the terminal."""
