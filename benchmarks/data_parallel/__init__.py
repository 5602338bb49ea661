"""What a second worker costs a training step: tfdist, stock tf.distribute and PyTorch DDP, one core a worker."""
