"""A pipeline in a report: bubbles, stages, and the schedule as it ran."""
