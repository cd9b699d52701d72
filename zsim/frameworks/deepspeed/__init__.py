"""DeepSpeed: engine, ZeRO stages, ZeRO++ and MiCS."""
