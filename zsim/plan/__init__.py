"""The plan of a step: the ops that each rank issues, without seconds and without hardware."""
