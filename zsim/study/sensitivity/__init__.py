"""Which number a result hangs on."""
