"""Start the ranks of a launch on every host of an allocation. Standard library only.

Command lines: launch_cli.py, watch_cli.py. Each step has its files:

- Plan: planner.py makes a Plan (launch_plan.py) from options, an allocation, the installed programs
  (programs.py) and a method (methods/). dry_run.py prints it, nested.py finds other launchers.
- Run: run_plan.py runs it, by a native launcher (native_launch.py), by agents (coordinator.py,
  agent.py) or on this host alone. launch_connection.py has the messages, event_loop.py the loop.
- On a host: host_ranks.py starts the ranks of an agent, with rank_environment.py and
  child_processes.py. Below a native launcher, rank_start.py becomes a rank after join.py has
  checked it, with rank_parent.py above it. rank_site/ attaches the watch to any script.
- End: launch_result.py collects what happens, with launcher_lines.py and stopped_ranks.py.
  outcome.py decides what it means, restarts.py whether and where the ranks start again.
"""
