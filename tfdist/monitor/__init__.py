"""`tfdist monitor`: what a run does, from the event log that its processes write. Nothing here imports TensorFlow."""
