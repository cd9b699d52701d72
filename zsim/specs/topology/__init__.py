"""Topologies: devices, directed links and routes, and the fabrics that are made from a few numbers."""
