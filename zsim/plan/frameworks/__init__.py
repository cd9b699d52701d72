"""The frameworks' schedules, each transcribed from the framework's source."""
