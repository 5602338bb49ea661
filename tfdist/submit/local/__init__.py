"""A queue on this machine: a runner in the background starts `tfdist run` for one job after the other."""
