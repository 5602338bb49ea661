"""What backups cost a training step, and how soon a killed training goes on: tfdist, Keras' callback and torchrun."""
