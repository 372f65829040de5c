"""Measure collectives, links between hosts, and the scaling of a training."""
