"""Notice a training that goes wrong without an error, and say on which rank and why.

Each rank samples its parameters after some of its optimizer steps, and the first batch of each
epoch. A thread compares the samples of all ranks over the store of the process group, without a
collective. A difference is logged once, as an ERROR; the training goes on.

Not noticed: a rank without DistributedDataParallel that makes no step of its optimizer.

On by default: who forgets set_epoch(), a sampler or DistributedDataParallel does not know what to
switch on. torch has a hook for the steps of all optimizers, but none for the epochs and batches of
loaders, which training_hooks wraps, nor a way from a parameter to its wrapper, for which gc is
searched, only after a difference was found. tests/bench/bench_consistency.py measures the cost.

Off: setup_distributed(check_training=False), or DDPKIT_CHECK_TRAINING=0. "error" ends the training.

samples.py has what a rank reports, comparison.py what is wrong with the reports of all ranks, and
training_watch.py when they are compared. All are loaded when a script trains.
"""
