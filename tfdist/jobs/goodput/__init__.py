"""`tfdist goodput`: what the wall time of a run went into, from its events."""
