"""What a memory policy saves, and what it costs: bytes at the peak of a step, and its time."""
