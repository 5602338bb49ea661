"""What it costs that many processes meet."""
