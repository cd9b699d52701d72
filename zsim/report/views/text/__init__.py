"""Reports on the terminal."""
