"""Real training to validate the simulator against: a readable ZeRO, other frameworks, an oracle, a
recorder."""
