"""ZeRO++: hpZ, qwZ and qgZ."""
