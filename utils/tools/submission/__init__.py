"""Submit training scripts as Slurm or PBS jobs, and follow, list, cancel and resubmit them.

cli.py runs the subcommands. build.py makes a Job from options and a site profile, submit.py submits
it, records.py keeps what was submitted, and in_job.py runs inside the job.
"""
