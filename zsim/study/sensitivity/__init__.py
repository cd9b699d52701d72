"""Which hardware and software numbers a result depends on."""
