"""Plans rewritten after the fact: one thread, two steps, hardware queues."""
