"""Clusters of processes on this machine that run a function: `tfdist.testing.run_local`."""
