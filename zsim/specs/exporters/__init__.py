"""From an experiment to files that other programs take."""
