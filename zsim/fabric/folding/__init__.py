"""Which ranks and communicators are alike, and simulated as one."""
