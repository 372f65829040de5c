"""Measure collectives, links between hosts, the scaling of a training, and its settings."""
