"""Measurements: each package answers one question, and `python -m benchmarks.<package>` asks it."""
