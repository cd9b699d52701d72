"""Activities that share resources at max-min fair rates on the simulated clock."""
