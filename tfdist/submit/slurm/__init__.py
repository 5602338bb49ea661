"""Slurm: a batch script for sbatch, which starts the training with srun."""
