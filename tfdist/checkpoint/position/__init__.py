"""Where a fit is in its data, and how another process gets there."""
