"""What each rank does: no seconds, no hardware."""
