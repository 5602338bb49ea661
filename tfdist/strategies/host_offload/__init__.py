"""Weights and optimizer on the host, one block of layers at a time on the device."""
