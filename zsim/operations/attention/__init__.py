"""The core of attention: its kernels fused or written out, alone or over sequences that ranks share."""
