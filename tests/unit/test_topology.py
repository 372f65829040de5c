"""What sysfs shows about cores, NUMA nodes and PCI devices, on recorded nodes and on this machine."""
from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.topologies import write_tree
from utils.host.cores import Core, pci_node, read_topology
from utils.host.gpus import intel_addresses, nvidia_address, visible_gpu_addresses
from utils.ranges import format_ranges, parse_ranges


def test_online_cores_have_their_threads_and_their_node(tmp_path: Path) -> None:
    """A host without sysfs has no topology, one without NUMA nodes is one group."""
    assert read_topology(tmp_path) is pci_node("0000:01:00.0", tmp_path) is None
    write_tree(tmp_path / "polaris", "polaris")
    topology = read_topology(tmp_path / "polaris")
    assert topology is not None and len(topology.cores) == 32
    assert topology.cores[0] == Core((0, 32), 0) and topology.cores[13] == Core((13, 45), 1)
    assert topology.to_text().startswith("0:0+32,1+33,2+34,3+35,4+36,")
    for name, online, text in (("polaris", "0-30", "0:0,1,2,3,4,5,6,"), ("no numa", "0-2", "0:0,1,2")):
        cpu = tmp_path / name / "sys/devices/system/cpu"
        cpu.mkdir(parents=True, exist_ok=True)
        (cpu / "online").write_text(f"{online}\n")
        topology = read_topology(tmp_path / name)
        assert topology is not None and topology.to_text().startswith(text)
        assert [core.cpus for core in topology.cores] == [(cpu,) for cpu in range(31 if name == "polaris" else 3)]


@pytest.mark.parametrize(("text", "numbers"), [
    ("", []), ("3", [3]), ("0-2,8\n", [0, 1, 2, 8]), ("0,2,4-5", [0, 2, 4, 5])])
def test_ranges_are_read_and_written(text: str, numbers: list[int]) -> None:
    assert parse_ranges(text) == set(numbers)
    assert format_ranges(reversed(numbers)) == text.strip()


@pytest.mark.parametrize(("vendor", "masks", "expected"), [
    ("nvidia", {}, "0 1 2"), ("nvidia", {"CUDA_VISIBLE_DEVICES": "2,0"}, "2 0"),
    ("nvidia", {"CUDA_VISIBLE_DEVICES": ""}, ""), ("nvidia", {"CUDA_VISIBLE_DEVICES": "GPU-b,7,MIG-x"}, "1 ? ?"),
    ("nvidia", {"CUDA_VISIBLE_DEVICES": "1,-1,2"}, "1"),
    ("amd", {}, "0 1 2"), ("amd", {"ROCR_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1"}, "2"),
    ("amd", {"HIP_VISIBLE_DEVICES": "2", "CUDA_VISIBLE_DEVICES": "2"}, "2"),
    ("intel", {}, "0 1 2"), ("intel", {"ZE_AFFINITY_MASK": "0.1"}, ""), ("none", {}, "")])
def test_visible_gpus_are_found_by_their_masks(
        vendor: str, masks: dict[str, str], expected: str, tmp_path: Path) -> None:
    addresses = ["0000:01:00.0", "0000:c1:00.0", "0001:18:00.0"]
    for index, address in enumerate(addresses):
        domain, bus = (int(part, 16) for part in address.split(":")[:2])
        files = {
            "nvidia": {f"proc/driver/nvidia/gpus/{address}/information": f"GPU UUID: \t GPU-{'abc'[index]}\n"},
            "amd": {f"sys/class/kfd/kfd/topology/nodes/{4 + index}/properties":
                    f"cpu_cores_count 0\nsimd_count 440\nlocation_id {bus << 8}\ndomain {domain}\n",
                    "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 16\nsimd_count 0\n"},
            "intel": {f"sys/bus/pci/devices/{address}/vendor": "0x8086\n",
                      f"sys/bus/pci/devices/{address}/device": "0x0bd6\n"}, "none": {}}
        for name, text in files[vendor].items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        if vendor == "intel":
            drm = tmp_path / f"sys/class/drm/card{index}"
            drm.mkdir(parents=True)
            (drm / "device").symlink_to(tmp_path / "sys/bus/pci/devices" / address)
    found = visible_gpu_addresses(masks, tmp_path)
    assert " ".join(str(addresses.index(one)) if one else "?" for one in found) == expected


def test_gpus_that_the_cgroup_of_a_job_denies_are_not_counted(tmp_path: Path) -> None:
    """Slurm gives a job the third and the fourth GPU of a host as CUDA_VISIBLE_DEVICES=0,1."""
    for number in range(4):
        gpu = tmp_path / f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"GPU UUID: \t GPU-{number}\nDevice Minor: \t {number}\n")
    (tmp_path / "dev").mkdir()
    for number in (2, 3):  # access(2) of the others fails in the cgroup
        (tmp_path / f"dev/nvidia{number}").touch()
    assert visible_gpu_addresses({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path) == ["0000:02:00.0", "0000:03:00.0"]


def test_gpus_are_found_without_torch(tmp_path: Path) -> None:
    for card, address, device in ((0, "0000:03:00.0", "0x56a0"), (1, "0001:18:00.0", "0x0bd6"),
                                  (2, "0000:6c:00.0", "0x0bd6")):
        pci = tmp_path / "sys/bus/pci/devices" / address
        pci.mkdir(parents=True)
        (pci / "vendor").write_text("0x8086\n")
        (pci / "device").write_text(f"{device}\n")
        drm = tmp_path / f"sys/class/drm/card{card}"
        drm.mkdir(parents=True)
        (drm / "device").symlink_to(pci)
    assert intel_addresses(tmp_path) == ["0000:6c:00.0", "0001:18:00.0"]

    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:41:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-3f2a-77\n")
    assert nvidia_address("3f2a-77", tmp_path) == "0000:41:00.0"
    assert nvidia_address("GPU-3f2a-77", tmp_path) == "0000:41:00.0"
    assert nvidia_address("3f2a-78", tmp_path) == nvidia_address("", tmp_path) == ""
