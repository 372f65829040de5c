"""Notice a training that goes wrong without an error, and say on which rank and why.

Each rank samples its parameters after some of its optimizer steps, and the first batch of each
epoch. A thread compares the samples of all ranks over the store of the process group, without a
collective. A difference is logged once, as an ERROR; the training goes on.

A rank without DistributedDataParallel whose optimizer makes no step is not noticed.

The check is on by default, because a user who forgets set_epoch(), a sampler or
DistributedDataParallel does not know that a check would help. torch has a hook for the steps of all
optimizers. It has none for the epochs and batches of loaders, so training_hooks wraps these. torch
also cannot find a parameter's wrapper: after a difference was found, gc searches for it.
tests/bench/bench_consistency.py measures the cost.

setup_distributed(check_training=False) or DDPKIT_CHECK_TRAINING=0 switches it off. "error" ends the
training at a difference.

samples.py makes the report of a rank, comparison.py finds what is wrong with the reports of all
ranks, and training_watch.py decides when to compare. All are loaded when a script trains.
"""
