"""Which CPUs each rank of a host gets: on the nodes of real clusters, and on random hosts."""
from __future__ import annotations

import random

import pytest

from tests.unit.topologies import NAMES, load_site
from utils.host.core_notes import note_on_cores
from utils.host.cores import (
    Core,
    Cpus,
    HostMasks,
    Topology,
    choose_cores,
    cores_in,
    divide,
    mask_of_cpus,
    openmp_binding,
    parse_binding,
)
from utils.ranges import parse_ranges
from utils.tools.submission.profiles import load


def host(*nodes: int, threads: int = 1) -> Topology:
    """A host whose NUMA nodes have these numbers of cores."""
    total = sum(nodes)
    of_cores = [node for node, size in enumerate(nodes) for _ in range(size)]
    return Topology(tuple(Core(tuple(core + thread * total for thread in range(threads)), node)
                          for core, node in enumerate(of_cores)))


def everything(topology: Topology) -> Cpus:
    return frozenset(cpu for core in topology.cores for cpu in core.cpus)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_of_a_site_run_beside_their_gpus(name: str) -> None:
    site = load_site(name)
    found = divide(site.topology, [site.mask] * len(site.gpus), site.gpus)
    published = parse_binding(site.cores)
    if site.by == "divide":
        assert found == published
    else:
        assert all(cores <= site.mask for cores in published)
    for rank, node in enumerate(site.gpus):
        assert {core.node for core in cores_in(site.topology, found[rank])} == {rank if node is None else node}


@pytest.mark.parametrize("name", NAMES)
def test_published_cores_can_be_given(name: str) -> None:
    site = load_site(name)
    ranks = len(site.gpus)
    host = HostMasks(True, site.topology.to_text(), site.cores, (mask_of_cpus(site.mask),) * ranks,
                     tuple(range(ranks)), tuple(site.gpus))
    assert [parse_ranges(one.cpus) for one in choose_cores(host)] == parse_binding(site.cores)
    assert note_on_cores("n1", len(site.mask), range(ranks), host) is None


@pytest.mark.parametrize("name", ["aurora", "derecho", "lumi", "polaris"])
def test_binding_of_a_profile_is_the_published_one(name: str) -> None:
    pytest.importorskip("yaml")
    given = parse_binding(str(load(name).binding))
    site = load_site(name)
    published = parse_binding(site.cores)
    if name == "derecho":  # NCAR names the first core of each NUMA node only
        given = [frozenset({min(cpus)}) for cpus in given]
    assert given == published


@pytest.mark.parametrize(("topology", "gpu_nodes", "expected"), [
    pytest.param(host(4), [None] * 2, [[0, 1], [2, 3]], id="two ranks without GPUs"),
    pytest.param(host(5), [None] * 2, [[0, 1, 2], [3, 4]], id="an odd number of cores"),
    pytest.param(host(8), [None] * 3, [[0, 1, 2], [3, 4], [5, 6, 7]], id="three ranks"),
    pytest.param(host(2, 2), [1, 0], [[2, 3], [0, 1]], id="GPUs in reverse order"),
    pytest.param(host(4, 4), [1, 1], [[4, 5], [6, 7]], id="both GPUs on one node"),
    pytest.param(host(4, 4), [0, None], [[0, 1, 2, 3], [4, 5, 6, 7]], id="one GPU unknown"),
    pytest.param(host(4, 4), [0, None, None, 1], [[0, 1], [2, 3], [4, 5], [6, 7]],
                 id="no cores left for the unknown"),
    pytest.param(host(2, 2), [1, 0, 0, 1], [[2, 3], [0, 1], [0, 1], [2, 3]], id="shared near the GPUs"),
    pytest.param(host(2, 1), [0, 1], [[0, 1, 2]] * 2, id="one core on the node of a GPU"),
    pytest.param(host(2, 2), [0, None, None, 1], [[*range(4)]] * 4, id="shared with the unknown"),
    pytest.param(host(2, 6), [0, 0, 1, 1], [[0, 1], [0, 1], [2, 3, 4], [5, 6, 7]], id="one near core each"),
    pytest.param(host(1, 7), [0, 0], [[0, 1, 2, 3], [4, 5, 6, 7]], id="a node with too few cores"),
    pytest.param(host(1, 7), [0], [[*range(8)]], id="one near core of eight"),
    pytest.param(host(2, 4), [0, 0], [[0, 1, 2], [3, 4, 5]], id="too few near cores"),
    pytest.param(host(2, 14), [1, 0, 0, 1], [[8, 9, 10, 11], [0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15]],
                 id="near cores for two ranks only"),
    pytest.param(host(2, 10), [0, 0, None], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
                 id="most cores near no GPU"),
    pytest.param(host(4), [7, 7], [[0, 1], [2, 3]], id="a node without CPUs")])
def test_cores_are_shared_out(topology: Topology, gpu_nodes: list[int | None], expected: list[list[int]]) -> None:
    """The expected numbers are those of the first CPU of each core of each rank."""
    found = divide(topology, [everything(topology)] * len(gpu_nodes), gpu_nodes)
    assert [[core.cpus[0] for core in cores_in(topology, cpus)] for cpus in found] == expected


def test_threads_of_a_core_stay_together_and_agents_divide_their_own_masks() -> None:
    topology = host(4, threads=2)
    mask = everything(topology) - {5}
    assert divide(topology, [mask] * 2, [None] * 2) == [frozenset({0, 1, 4}), frozenset({2, 3, 6, 7})]
    masks = [frozenset(range(4))] * 2 + [frozenset(range(4, 8))] * 2
    assert divide(host(8), masks, [None] * 4) == [frozenset({cpu, cpu + 1}) for cpu in (0, 2, 4, 6)]


@pytest.mark.parametrize("masks", [
    [{0}, {1}], [{0, 1}, {2, 3}], [{0, 1, 2}, {2, 3}], [{0}, {0}], [{0, 1, 2}] * 2, [{0, 1, 2, 3}, {0, 1}],
    [{0, 1, 2, 99}] * 2],
    ids=["a core each", "two each", "overlapping", "fewer cores than ranks", "fewer than two cores for each rank",
         "one within the other", "unknown CPUs"])
def test_masks_that_are_not_shared_stay(masks: list[set[int]]) -> None:
    frozen = [frozenset(mask) for mask in masks]
    assert divide(host(4), frozen, [None] * len(masks)) == frozen


def test_rank_is_far_when_no_core_is_on_the_node_of_its_gpu() -> None:
    masks, gpu_nodes = ("3", "6", "1", "1"), (1, 1, None, 5)
    chosen = choose_cores(HostMasks(True, host(2, 2).to_text(), "", masks, (0, 1, 2, 3), gpu_nodes))
    assert [one.gpu_node for one in chosen] == [1, None, None, None]


def test_random_hosts_and_masks_keep_the_promises() -> None:
    chance = random.Random(12)
    for number in range(10_000):
        nodes = [chance.randint(0, 3) * chance.randint(1, 8) for _ in range(chance.randint(1, 4))]
        topology = host(*nodes, 1, threads=chance.choice((1, 2)))
        cpus = sorted(everything(topology))
        mask = frozenset(chance.sample(cpus, chance.randint(1, len(cpus))))
        ranks = chance.randint(1, 8)
        gpu_nodes = [chance.choice((None, *range(len(nodes) + 2))) for _ in range(ranks)]
        masks = [mask] * ranks
        if number % 4 == 0:  # any masks, alike or not
            masks = [frozenset(chance.sample(cpus, chance.randint(1, len(cpus)))) if chance.random() < 0.5 else mask
                     for _ in range(ranks)]
        found = divide(topology, masks, gpu_nodes)

        assert all(found) and all(cpus <= mask for cpus, mask in zip(found, masks, strict=True))
        if len(set(masks)) > 1:
            continue
        cores = [cores_in(topology, cpus) for cpus in found]
        usable = cores_in(topology, masks[0])
        if len(usable) < ranks:
            assert found == masks
            continue
        fewest = min(map(len, cores))
        assert fewest >= min(2, len(usable)) and 2 * ranks * fewest >= len(usable), "too few cores"
        given = [core for its_cores in cores for core in its_cores]
        unused = set(usable) - set(given)
        if len(set(given)) < len(given):  # ranks share cores
            assert len(usable) <= 2 * ranks, "there are enough cores to divide"
        for its_cores, node in zip(cores, gpu_nodes, strict=True):
            if unused:  # only cores that are near no GPU of a rank, and then all ranks are near theirs
                assert {core.node for core in its_cores} == {node}
        assert all(core.node not in gpu_nodes for core in unused)


@pytest.mark.parametrize(("text", "cpus"), [
    ("list:4-7:8-11", [{4, 5, 6, 7}, {8, 9, 10, 11}]), ("list:0:16:32:48", [{0}, {16}, {32}, {48}]),
    ("verbose,list:0-1,4:2", [{0, 1, 4}, {2}])])
def test_binding_of_a_site_is_read(text: str, cpus: list[set[int]]) -> None:
    assert parse_binding(text) == cpus


@pytest.mark.parametrize("text", [
    "", "list:", "list:a", "list:3-1", "list:0-:1", "list:0-99999999999", "4-7", "mask_cpu:0xf0",
    "cores"])
def test_bad_binding_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="^DDPKIT_CPU_BIND is .*Expected .*unset it$"):
        parse_binding(text)


@pytest.mark.parametrize(("environ", "expected"), [
    ({}, ""), ({"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}, "OMP_PROC_BIND=close"),
    ({"OMP_PROC_BIND": "FALSE", "GOMP_CPU_AFFINITY": "0-3"}, ""), ({"OMP_PLACES": "cores"}, "OMP_PLACES=cores"),
    ({"GOMP_CPU_AFFINITY": "0-3"}, "GOMP_CPU_AFFINITY=0-3"), ({"OMP_PROC_BIND": ""}, "")])
def test_binding_by_openmp_is_found_in_its_variables(environ: dict[str, str], expected: str) -> None:
    assert openmp_binding(environ) == expected
