"""Clusters: GPUs, hosts, links, drives and networks, every number with its source."""
