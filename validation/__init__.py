"""Real training, to hold the simulator against: a readable ZeRO, other people's, an oracle, a recorder."""
