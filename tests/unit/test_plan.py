"""ddpkit plan from numbers: reference figures, links, advice, and the page in a real browser."""
from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from utils.tools.plan import advice
from utils.tools.plan import plan_cli as cli
from utils.tools.plan.figures import percentages, seconds_range, with_unit
from utils.tools.plan.hardware import Hardware, Link, Network, sent_bytes
from utils.tools.plan.step_model import (
    BUCKET,
    DDP_SECONDS,
    FIRST_BUCKET,
    LOSS,
    MIB,
    Computation,
    Gradient,
    even_computation,
    even_workload,
    expected_maximum,
    fill_buckets,
    simulate,
    workload,
)

Plan = Callable[..., dict[str, Any]]
SEVEN_BILLION = "--parameters 7e9 --precision bf16"


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    def run(options: str) -> dict[str, Any]:
        assert cli.main([*options.split(), "--json"]) == 0
        return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]
    return run


def rows(found: dict[str, Any]) -> dict[int, dict[str, float]]:
    return {row["gpus"]: row for row in found["scaling"]}


# --- reference figures, each with the line that computes it

def test_seven_billion_parameters_send_24_gb_in_500_ms_on_8_gpus(plan: Plan) -> None:
    step = rows(plan(f"{SEVEN_BILLION} --gpus 8 --bandwidth 50e9 --compute-seconds 0.2"))[8]
    assert step["sent_bytes"] == pytest.approx(2 * 7 / 8 * 14e9) == 24.5e9
    assert step["communication_seconds"] == pytest.approx(0.5, rel=0.03)
    assert step["efficiency"] < 0.4  # although communication overlaps with the backward pass


def test_adamw_in_mixed_precision_needs_16_bytes_per_parameter(plan: Plan) -> None:
    memory = plan(SEVEN_BILLION)["memory"]
    assert memory["parameters"] + memory["gradients"] + memory["optimizer"] == (2 + 2 + 4 + 4 + 4) * 7e9 == 112e9
    assert memory["buckets"] == 14e9


def test_one_all_reduce_per_parameter_reaches_a_tenth_of_the_bandwidth() -> None:
    """ResNet-50, 161 parameters with 25.6 million elements, on 8 GPUs with NVLink, whose figures have sources."""
    hardware = Hardware()
    hardware.check()
    assert all(hardware.accelerator(name).memory > 1e10 for name in ("a100-40", "mi250x", "mi300a"))
    nvlink = hardware.link("nvlink3")
    network = Network(nvlink, nvlink, 8)
    gradients = [Gradient(0.0, 4 * 25.6e6 / 161)] * 161

    def bandwidth(messages: Any) -> float:
        seconds = sum(network.all_reduce_seconds(message.size, 8) for message in messages)
        return sent_bytes(4 * 25.6e6, 8) / seconds
    assert bandwidth(gradients) / nvlink.bandwidth == pytest.approx(0.1, abs=0.01)
    assert bandwidth(fill_buckets(gradients)) / nvlink.bandwidth > 0.75


def links_file(path: Path, inside: tuple[float, float] | None, between: tuple[float, float], hosts: int = 2) -> Path:
    """Write links as bench.py does: bandwidth and latency."""
    inside_, between_ = (link and {"bandwidth_bytes_per_second": link[0], "latency_seconds": link[1]}
                         for link in (inside, between))
    path.write_text(json.dumps({"format": 1, "hosts": hosts, "inside": inside_, "between": between_}))
    return path


def test_seven_billion_parameters_collapse_beyond_32_gpus(plan: Plan, tmp_path: Path) -> None:
    """So for 0.5 s of computation, nodes of 4 GPUs, 100 GB/s and 40 µs between them, and rings."""
    links = links_file(tmp_path / "links.json", None, (100e9, 40e-6))
    found = plan(f"{SEVEN_BILLION} --gpus 256 --gpus-per-node 4 --compute-seconds 0.5 --ring "
                 f"--links {links} --inside nvlink3")
    assert found["holds_up_to"] == {"0.8": 16, "0.7": 16}  # of the lower end
    efficiency = {gpus: row["efficiency"] for gpus, row in rows(found).items()}
    assert efficiency[16] > 0.8 and 0.7 < efficiency[32] < 0.8 and efficiency[64] < 0.56 and efficiency[128] < 0.4


# --- advice: every sentence

STATES = {"parameters": 4e9, "gradients": 4e9, "optimizer": 8e9, "buckets": 4e9}
VIEW = "DDP(gradient_as_bucket_view=True) saves 4 GB, the second copy of the gradients."
LESS = "Activations, inputs and temporary memory need 60 GB. Use "
CHECKPOINT = "torch.utils.checkpoint, which recomputes activations."
SMALLER = LESS + "a smaller micro-batch with accumulation, or " + CHECKPOINT
FUSED = ("The peak is in the optimizer, whose temporary tensors need 8 GB. Adam, AdamW, SGD and Adagrad have none "
         "with fused=True: the training then needs {} GB.")


def fails(needed: str, usable: str, *changes: str, even: str = "", **fit: Any) -> advice.Fit:
    return advice.Fit((f"The training does not fit{even}: {needed} GB of the {usable} GB that are usable on x.",
                       *changes), **fit)


@pytest.mark.parametrize(("more", "capacity", "options", "expected"), [
    ({}, 36e9, {"largest": 8, "batch": 2},
     advice.Fit(("The training fits: 20 GB of the 36 GB that are usable on x.",), free=4.0)),
    ({}, 36e9, {"complete": False}, advice.Fit((
        "Without activations, the training needs 20 GB of the 36 GB that are usable on x. They may not fit: give a "
        "script or --model.",))),
    ({}, 300e9, {"complete": False}, advice.Fit((
        "Without activations, the training needs 20 GB of the 300 GB that are usable on x. Activations are not "
        "counted: give a script or --model.",))),
    ({"activations": 15e9}, 34e9, {}, fails("35", "34", VIEW + " Then it fits.")),
    ({}, 18e9, {"complete": False},
     fails("20", "18", VIEW + " Then the rest fits.", even=" even without activations")),
    *(({"activations": 60e9}, 36e9, options, fails("80", "36", LESS + change, this_batch=False))
      for options, change in (
        ({"batch": 9}, "a smaller micro-batch with accumulation, or " + CHECKPOINT),
        ({}, "a smaller micro-batch with accumulation, if it has more than 1 sample, or " + CHECKPOINT),
        ({"batch": 1}, CHECKPOINT), ({"batch": 9, "largest": 0}, CHECKPOINT),
        ({"batch": 9, "largest": 2},
         "a micro-batch of 2, the largest that fits, with accumulation, or " + CHECKPOINT))),
    ({"temporary": 8e9}, 27e9, {"batch": 9, "passes": {**STATES, "activations": 6e9}},
     fails("28", "27", FUSED.format("26"))),
    ({"temporary": 8e9}, 19e9, {"passes": {**STATES, "activations": 6e9}, "batch": 1},
     fails("28", "19", FUSED.format("26"), VIEW, LESS.replace("60 GB", "6 GB") + CHECKPOINT, this_batch=False)),
    ({"activations": 1e9}, 10e9, {}, fails(
        "21", "10", "Parameters, gradients and optimizer need 16 GB on each GPU with any batch size. Use FSDP2 "
        "(fully_shard): 2 GB on each of 8 GPUs, or HSDP, which shards within a node only.", ddp=False)),
    ({}, 1e9, {"complete": False},
     fails("20", "1", "Parameters, gradients and optimizer need 16 GB. Use FSDP2 (fully_shard) on more than 16 "
           "GPUs.", even=" even without activations", ddp=False)),
    ])
def test_memory_advice_recommends_the_first_change_that_fits(
        more: dict[str, float], capacity: float, options: dict[str, Any], expected: advice.Fit) -> None:
    options = {"complete": True, **options}
    assert advice.memory_advice({**STATES, **more}, capacity, 8, "x", **options) == expected


def scaling_advice(fit: advice.Fit, compute: float = 0.07, gradient_bytes: int = 4) -> list[str]:
    """Of 1 GB of gradients on 16 GPUs, 8 a node, with 10 GB/s between nodes: 0.2 s for an all-reduce."""
    work = workload(even_computation(1e9, compute), spread=0.0)
    network = Network(Link(100e9, 0.0), Link(10e9, 0.0), 8, tree=False)
    return advice.scaling_advice(work, network, 16, gradient_bytes, fit)


WAITS = (r"On 16 GPUs the efficiency is {}: each GPU waits {} for communication and up to .* for slower GPUs, "
         r"communication kernels and DDP itself, and computes for {}")
SHARD = ("If these are not enough, FSDP2 or HSDP free memory for a larger micro-batch, which computes longer between "
         "exchanges. Each GPU then sends 1.5 times the bytes of DDP in a step.")


def test_scaling_advice_follows_from_what_fits() -> None:
    assert scaling_advice(advice.Fit(ddp=False)) == [
        "The scaling is that of DDP, which does not fit. FSDP2 sends 1.5 times its bytes."]
    smaller, = scaling_advice(advice.Fit(this_batch=False))
    assert re.fullmatch(WAITS.format("2.% to 3.%", ".* ms", "70 ms") + ", with the micro-batch that does not fit.",
                        smaller)
    good, = scaling_advice(advice.Fit(), compute=2.0)
    assert good == ("On 16 GPUs the efficiency is 95% to over 99%: each GPU waits up to 94 ms for slower GPUs, "
                    "communication kernels and DDP itself, and computes for 2 s. Stay with DDP.")
    one, = advice.scaling_advice(even_workload(1e6, "fp32", 0.2), Network(Link(1e9, 0), Link(1e9, 0), 8), 1, 4,
                                 advice.Fit())
    assert one == "On 1 GPU, a step takes 200 ms, 190 to 210. Nothing is communicated."


def test_gain_below_the_error_of_the_prediction_is_no_advice() -> None:
    """With latency alone, half the bytes gain nothing."""
    work = workload(even_computation(1e6, 0.01), spread=0.0)
    network = Network(Link(1e12, 2e-3), Link(1e12, 2e-3), 8, tree=False)
    texts = advice.scaling_advice(work, network, 8, 4, advice.Fit(free=1.5))
    assert any("Accumulate" in text for text in texts) and not any("hook" in text for text in texts), texts


def test_poor_scaling_names_a_larger_micro_batch_before_sharding() -> None:
    alone = scaling_advice(advice.Fit(free=1.5))
    assert re.fullmatch(WAITS.format("2.% to 3.%", ".* ms", "70 ms") + ". The target is 80%.", alone[0])
    assert re.fullmatch(r"Accumulate (\d+) micro-steps under no_sync\(\): 8.% to 8.%, if training converges with \1 "
                        "times the global batch.", alone[1])
    assert re.fullmatch("A bf16 or fp16 communication hook halves the bytes: 4.% to [567].%.", alone[2])
    assert alone[3] == SHARD and len(alone) == 4

    free = scaling_advice(advice.Fit(free=4.9))
    assert re.fullmatch("Memory is free for 4 times the micro-batch: .* to [89].%, if training converges with 4 times "
                        "the global batch.", free[1])
    assert SHARD not in free and len(free) == 4
    unknown = scaling_advice(advice.Fit(), gradient_bytes=2)
    assert unknown[2] == "Where memory is free, a larger micro-batch has the same effect." and SHARD not in unknown
    assert not any("hook" in text for text in unknown)


def test_advice_has_no_number_that_the_table_contradicts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--parameters", "124e6", "--compute-seconds", "0.2", "--site", "perlmutter", "--between",
                     "1 ethernet-10", "--nodes", "40"]) == 0
    text = capsys.readouterr().out
    row, = re.findall(r"^ +160 .*B  (.*%.*)$", text, re.MULTILINE)
    assert f"On 160 GPUs the efficiency is {row}: each GPU waits" in text
    limit, = re.findall(r"at least 80% on up to (\d+) GPUs", text)
    assert re.search(rf"^ +{limit} ", text, re.MULTILINE)


def test_scaling_is_a_range_that_slower_gpus_lower(plan: Plan) -> None:
    options = "--parameters 1e6 --gpus 1024 --site perlmutter --compute-seconds 1"
    points = rows(plan(options))
    assert points[1]["low_efficiency"] == points[1]["efficiency"] == 1
    assert 0.90 < points[1024]["low_efficiency"] < 0.93 < 0.99 < points[1024]["efficiency"]
    assert 0.96 < rows(plan(options + " --spread 0"))[1024]["low_efficiency"] < 0.98  # what published ones lose, too
    assert expected_maximum(2) == pytest.approx(0.564, abs=0.03)  # 1/sqrt(pi)
    assert expected_maximum(1000) == pytest.approx(3.241, abs=0.03)  # Harter, Biometrika 1961


def test_communication_takes_a_part_of_the_gpu_while_it_overlaps() -> None:
    network = Network(Link(10e9, 0.0), Link(10e9, 0.0), 8)
    step = even_workload(2.5e8, "fp32", 1.0, spread=0.0).step(network, 8)
    part = step.delay - LOSS * step.computation
    assert part == pytest.approx(20 / 132 * (step.communication - step.exposed)) and part > 0.01


def test_ddp_itself_costs_time_for_each_gradient_on_several_gpus() -> None:
    """Published: 4 to 40 µs for each tensor, also where nothing is sent to another node."""
    network = Network(Link(1e12, 0.0), Link(1e12, 0.0), 8)
    gradients = tuple(Gradient(i * 1e-4, 1e3) for i in range(100))
    work = workload(Computation(gradients, 0.01), spread=0.0)
    alone, two = work.step(network, 1), work.step(network, 2)
    assert alone.efficiency == alone.low_efficiency == 1
    assert two.overhead == pytest.approx(100 * DDP_SECONDS[0])
    assert two.delay >= LOSS * 0.01 + 100 * (DDP_SECONDS[1] - DDP_SECONDS[0])


def test_an_efficiency_is_as_uncertain_as_the_computation() -> None:
    network = Network(Link(1e9, 0.0), Link(1e9, 0.0), 8)
    work = even_workload(1e8, "fp32", 0.5, spread=0.0)
    known, predicted = work.step(network, 8), replace(work, error=1.5, predicted=True).step(network, 8)
    assert predicted.total == known.total
    assert predicted.low_efficiency < known.low_efficiency and predicted.efficiency > known.efficiency
    low, high = predicted.seconds_range(1.5)
    assert low == pytest.approx(predicted.total / 1.5) and high > 1.5 * predicted.total


# --- the model

def test_buckets_are_closed_by_the_gradient_that_fills_them_and_wait_for_each_other() -> None:
    gradients = [Gradient(float(i), size * MIB) for i, size in enumerate((0.5, 0.5, 24, 2, 30, 3))]
    sizes = [(bucket.ready, bucket.size / MIB) for bucket in fill_buckets(gradients, BUCKET, FIRST_BUCKET)]
    assert sizes == [(1, 1), (3, 26), (4, 30), (5, 3)]
    buckets = [Gradient(4.0, 2.0), Gradient(5.0, 1.0), Gradient(7.5, 1.0)]
    step = simulate(Computation(tuple(buckets), 8.0), buckets, lambda size: size)
    assert [begin for begin, _, _ in step.transfers] == [4.0, 6.0, 7.5] and step.exposed == 0.5


def test_slowest_link_and_latency_of_each_hop_count() -> None:
    network = Network(Link(100.0, 1.0), Link(10.0, 5.0), 4, tree=False)
    # gloo's ring, in two passes: half of each block, then its other half, which hides the latency of the next one.
    assert network.all_reduce_seconds(100.0, 8) == pytest.approx(
        2 * (6 * 1.0 + 1 * 5.0) + 2 * (7 + 1) * 100 / 16 / 10)
    assert network.all_reduce_seconds(1000.0, 8) == pytest.approx(2 * (6 * 1.0 + 1 * 5.0) / 7 + 1.75 * 1000 / 10)
    tree = Network(Link(100.0, 1.0), Link(10.0, 5.0), 4)
    assert tree.all_reduce_seconds(0.0, 64) == 2 * (3 * 1.0 + 4 * 5.0)


# --- the command

def test_the_start_takes_longer_on_more_nodes_unless_it_is_staged(plan: Plan) -> None:
    def note(nodes: int) -> list[str]:
        found = plan(f"{SEVEN_BILLION} --site perlmutter --compute-seconds 1 --nodes {nodes}")["notes"]
        return [text for text in found if "--stage" in text]
    assert not note(1)  # one reader is not what makes it slow
    for nodes, seconds in ((8, "51 s from Lustre, 240 s from NFS"), (64, "410 s from Lustre, 1900 s from NFS")):
        text, = note(nodes)
        known = "measured on 8 nodes" if nodes == 8 else "extrapolated from 8 nodes"
        assert f"on {nodes} nodes need about {seconds} ({known}), or 2 s from a copy" in text
        assert "takes 75 s the first" in text


def test_measured_links_replace_those_of_the_site(plan: Plan, tmp_path: Path) -> None:
    """The mean latency of a ring of 2 hosts of 4 GPUs is that of its slow links: 6 of 7 messages stay within a node."""
    file = links_file(tmp_path / "links.json", None, (1e9, 1e-4))
    inputs = plan(f"--parameters 1e6 --site polaris --links {file}")["inputs"]
    assert (inputs["between_bandwidth"], inputs["inside_latency"], inputs["gpus_per_node"]) == (1e9, 1e-4, 4)
    links_file(file, (1e9, 1e-6), (1e9, 3e-6))
    found = plan(f"--parameters 1 --gpus 8 --gpus-per-node 4 --links {file} --compute-seconds 1e-9 --ring")
    assert found["inputs"]["between_latency"] == pytest.approx(7 * 3e-6 - 6 * 1e-6)
    assert rows(found)[8]["communication_seconds"] == pytest.approx(2 * 7 * 3e-6, rel=1e-2)


@pytest.mark.parametrize(("options", "words"), [
    ("--parameters 1e6 --site perlmuter", "perlmutter"), ("--parameters 1e6 --gpu a100-41", "a100-40"),
    ("--parameters 1e6 --links /nowhere", "cannot be read"), ("--model no_such:thing", "no_such"),
    ("--parameters 1e6 --site derecho", "--gpu"), ("nothing.py", "nothing.py"),
    ("--parameters 1e6 --html /nowhere/x", "A page needs the time of a step"),
    ("--parameters 1e6 --compute-seconds 1 --html /nowhere/x", "/nowhere/x: No such file or directory. Expected"),
    ("--model json:dumps --precision bf16", "bf16-pure")])
def test_mistake_is_named(options: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(options.split()) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(("options", "present", "absent"), [
    ("--parameters 7e9 --precision bf16 --gpu a100-80",
     ["126 GB", "does not fit", "FSDP2", "No step time: give --compute-seconds"],  # --gpu alone helps for a script
     "efficiency"),
    ("--parameters 1e6", ["parameters       4 MB"], "Advice"),  # none without a GPU
    ("--parameters 1e6 --compute-seconds 1", [
        "Assumed: 8 GPUs per node, as with a100-40 (--gpus-per-node), nvlink3 within a node (--inside), 8 hdr between "
        "nodes (--between)\n"], "No step time"),
    ("--parameters 1e6 --site perlmutter", ["parameters       4 MB"], "Assumed")])
def test_text_says_what_is_assumed_and_what_is_missing(
        options: str, present: list[str], absent: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(options.split()) == 0
    text = capsys.readouterr().out
    assert all(words in text for words in present) and absent not in text, text


@pytest.mark.parametrize(("value", "unit", "digits", "text"), [
    (0.0169, "s", 2, "17 ms"), (0.9996, "s", 2, "1 s"), (999.6e-6, "s", 2, "1 ms"), (1e-10, "s", 2, "0"),
    (0.0, "s", 2, "0"), (12345.0, "s", 2, "12000 s"), (2.958e9, "B", 3, "2.96 GB"), (260.0, "B", 3, "260 B"),
    (125e3, "B", 2, "130 kB"), (124e6, "", 3, "124 M")])
def test_numbers_have_few_digits_and_a_prefix(value: float, unit: str, digits: int, text: str) -> None:
    assert with_unit(value, unit, digits) == text


@pytest.mark.parametrize(("value", "low", "high", "text"), [
    (0.27, 0.23, 0.31, "270 ms, 230 to 310"), (0.95, 0.76, 1.234, "950 ms, 760 to 1200"),
    (1.2, 0.93, 1.5, "1.2 s, 0.93 to 1.5"),
    (12e-6, 9.5e-6, 15e-6, "12 µs, 9.5 to 15"), (1e-12, 1e-13, 1e-11, "0")])
def test_a_time_is_printed_with_its_range(value: float, low: float, high: float, text: str) -> None:
    assert seconds_range(value, low, high) == text


@pytest.mark.parametrize(("low", "high", "text"), [
    (0.944, 0.981, "94% to 98%"), (0.9, 0.9001, "90%"), (0.98, 0.9999, "98% to over 99%"), (0.99, 1.0, "99% or more"),
    (0.996, 1.0, "over 99%"), (0.001, 0.012, "under 1% to 1%")])
def test_an_efficiency_is_never_a_hundred_percent(low: float, high: float, text: str) -> None:
    assert percentages(low, high) == text


def test_report_prints_neither_noise_nor_zeros(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--parameters", "1e5", "--compute-seconds", "0.7", "--site", "vista", "--nodes", "2"]) == 0
    text = capsys.readouterr().out
    assert not re.search(r"100(\.0)? ?%|\b0\.0+\b|\d\.\d{3}", text), text
    assert text.startswith("100 k parameters on vista: 2 GPUs gh200, 1 per node, 370 GB/s within a node and 50 GB/s")


# --- the table of accelerators

@pytest.mark.parametrize(("gpu", "gpus", "inside", "between"), [
    ("v100-16", 8, 120e9, 48e9), ("a100-80", 8, 240e9, 200e9), ("h100", 8, 370e9, 400e9), ("h200", 8, 370e9, 400e9),
    ("gh200", 4, 370e9, 100e9), ("b200", 8, 721e9, 400e9), ("gb200", 4, 721e9, 200e9), ("mi250x", 8, 50e9, 100e9),
    ("mi300a", 4, 288e9, 100e9), ("mi300x", 8, 336e9, 400e9), ("mi355x", 8, 336e9, 400e9), ("l40s", 8, 24e9, 50e9),
    ("rtx3090", 4, 24e9, 12.5e9), ("rtx4090", 8, 24e9, 12.5e9), ("rtx5090", 8, 48e9, 12.5e9),
    ("rtx-pro-6000", 8, 48e9, 100e9)])
def test_an_accelerator_has_the_links_of_its_usual_node(
        plan: Plan, gpu: str, gpus: int, inside: float, between: float) -> None:
    found = plan(f"--parameters 1e6 --compute-seconds 1 --gpu {gpu} --nodes 2")["inputs"]
    assert (found["gpus_per_node"], found["inside_bandwidth"], found["between_bandwidth"]) == (gpus, inside, between)


@pytest.mark.parametrize(("device", "peak"), [
    ("NVIDIA GH200 480GB", 989.5e12), ("NVIDIA H200", 989.5e12), ("NVIDIA H100 PCIe", 756e12),
    ("NVIDIA A100-SXM4-40GB", 312e12), ("Tesla V100-SXM2-16GB", 125e12), ("NVIDIA GeForce RTX 4090", 165.2e12),
    ("AMD Instinct MI300X", 1307.4e12), ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8e12), ("Tesla T4", 0.0)])
def test_the_peak_of_a_device_is_found_by_its_name(device: str, peak: float) -> None:
    assert Hardware().peak_flops(device) == pytest.approx(peak)


@pytest.mark.parametrize(("text", "count"), [("7B", 7e9), ("124M", 124e6), ("1.5e9", 1.5e9), ("350k", 350e3),
                                             ("1T", 1e12)])
def test_parameters_are_counted_as_papers_write_them(plan: Plan, text: str, count: float) -> None:
    assert plan(f"--parameters {text}")["inputs"]["parameters"] == count


@pytest.mark.parametrize("text", ["7X", "-7B", "0", "nan", "inf", "B"])
def test_what_is_no_number_of_parameters_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([f"--parameters={text}"])
    assert f"{text!r} is no number of parameters" in capsys.readouterr().err
