"""Classes of ranks and groups that behave equally, and are simulated by one representative each."""
