"""Predict memory, step time and scaling of DDP training before a job is submitted."""
