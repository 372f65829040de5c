"""Starting ranks on every host of an allocation, by the best means there is. scripts/launch.py is its command line.

  plan.py         allocation, programs that are here, options -> Plan: the exact commands. Pure
  programs.py     which of the programs are here, and which mpiexec is which; gpus.py counts the GPUs of this host
  container.py    a command in a container
  run.py          carries a plan out: one native command (srun, mpiexec), ranks on this host, or agents
  control.py      the head of the agents; agent.py runs on each host and starts its ranks; wire.py lies between them
  report.py       rank 0 tells the launch that all ranks have saved after a stop
  processes.py    processes of one host: started, signalled, ended, and never left behind
Standard library only. Not here: how a rank finds out which one it is (launchers.py).
"""
