"""Submitting the pipeline to Slurm, or running it on this machine with the same scripts."""
