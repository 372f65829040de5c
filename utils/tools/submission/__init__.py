"""Submit training scripts as Slurm or PBS jobs, and follow, list and cancel them.

submit_cli.py runs the subcommands. build_job.py makes a Job from options and a site profile,
submit.py submits it, submissions.py keeps what was submitted, and job_start.py runs inside the job.
"""
