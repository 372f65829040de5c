"""OpenPBS and PBS Professional: allocations and jobs."""
