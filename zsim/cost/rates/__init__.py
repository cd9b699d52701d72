"""Rates of idle devices: GPUs, hosts, CPUs and drives."""
