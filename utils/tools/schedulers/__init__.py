"""Submitting jobs to Slurm and PBS, and querying them."""
