"""How fast a fit trains, and how long it waits for its data."""
