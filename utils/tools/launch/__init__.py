"""Start the ranks of a launch on every host of an allocation. launch_cli.py is the command line.

Options, an allocation and the installed programs make a Plan (planner.py, methods/).
run() carries it out: by a native launcher (native_launch.py, join.py, rank_start.py), by an agent
on each host (coordinator.py, agent.py), or on this host alone. Standard library only.
"""
