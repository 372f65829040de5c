"""The mpiexec of PALS, HPE's launcher on Cray EX. Source: mpiexec(1) of PALS."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..launch_plan import Plan, PlanError, Request
from .native_launcher import MpiexecMethod, labels_output


class Pals(MpiexecMethod):
    """Only PALS gives its ranks the keys to the Slingshot network of a Cray."""

    title = "PALS"
    version_pattern = r"\bPALS\b|\bpals\b"

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._reads_node_file = False  # it lists the very hosts of the plan

    def configure(self, request: Request, environ: dict[str, str]) -> dict[str, str]:
        environ = super().configure(request, environ)
        if not request.options.torchrun:
            environ["WORLD_SIZE"] = str(request.world_size)  # PALS itself does not always set it
        return environ

    def configure_in_pbs(self, request: Request) -> None:
        assert request.allocation is not None
        slots = zip(request.allocation.hosts, request.allocation.ranks_per_host, strict=True)
        listed = tuple(host for host, count in slots if count)
        self._reads_node_file = (
            bool(request.environ.get("PBS_NODEFILE")) and listed == request.hosts
        )

    def command(self, plan: Plan, words: Sequence[str]) -> list[str]:
        return [self.path, *self._options(plan), *words]

    def _options(self, plan: Plan) -> Iterator[str]:
        counts = plan.processes
        if len(set(counts)) > 1:
            raise PlanError(
                f"the hosts have different numbers of ranks ({', '.join(map(str, counts))}), and "
                "PALS starts the same number on every host. Give --ntasks-per-node, or choose "
                "--launcher pbs_tmrsh or --torchrun"
            )
        yield from ("-n", str(sum(counts)), "--ppn", str(counts[0]))
        if labels_output(plan):
            yield "--label"
        if not self._reads_node_file:
            yield from ("--hosts", ",".join(plan.hosts))

        # The kit binds the ranks. PALS would count CPUs from 0, across sockets, whatever the GPUs.
        yield from ("--cpu-bind", "none")
