"""One folder per framework: its schedule, written from its source."""
