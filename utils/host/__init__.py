"""This host: processes, network, devices, cores, and what NCCL logs."""
