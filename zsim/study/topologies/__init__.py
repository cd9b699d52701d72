"""One job on several fabrics, and collectives on one."""
