"""What a training step holds, by device and block: estimated from its graph, or measured."""
