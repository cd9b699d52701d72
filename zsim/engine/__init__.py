"""Where the plan meets the hardware."""
