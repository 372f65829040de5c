"""What qstat and pbsnodes print: tables, `NAME = value` lines and JSON, byte for byte as recorded."""
from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from tests.cluster.pbs_standin.jobs import SERVER

VERSION = "23.06.06"
WIDTH, TAB = 79, 8
TEXT_ALWAYS = ("Job_Name",)  # every other value that looks like a number or a truth value becomes one in JSON
Attributes = Mapping[str, Any]


def json_value(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: json_value(key, each) for key, each in value.items()}
    if not isinstance(value, str) or name in TEXT_ALWAYS:
        return value
    if value in ("true", "false"):
        return value == "true"
    if not re.fullmatch(r"\s*-?\d+\.?\d*([eE][+-]?\d+)?", value):
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 1e15 else number


def as_json(value: Any, depth: int = 0) -> str:
    """JSON with a tab per level, as the cJSON library writes it."""
    if not isinstance(value, Mapping):
        return json.dumps(value, ensure_ascii=False)
    tab = "\t" * (depth + 1)
    if not value:
        return "{\n" + "\t" * depth + "}"
    lines = [f"{tab}{json.dumps(key, ensure_ascii=False)}:\t{as_json(each, depth + 1)}" for key, each in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + "\t" * depth + "}"


def document(kind: str = "", content: Mapping[str, Any] | None = None) -> str:
    top: dict[str, Any] = {"timestamp": int(time.time()), "pbs_version": VERSION, "pbs_server": SERVER}
    if content:
        top[kind] = json_value(kind, content)
    return as_json(top)


def folded(line: str) -> str:
    """A long line of qstat -f: broken after a comma where one helps, else in the middle of a word."""
    if len(line) <= WIDTH:
        return line
    lines, current, column = [], "", 0
    for piece in re.findall(r"[^,]*,|[^,]+", line):
        if current.strip() and column + len(piece) >= WIDTH and "," in line:
            lines.append(current)
            current, column = "\t", TAB
        while column + len(piece) > WIDTH:
            room = WIDTH - column
            lines.append(current + piece[:room])
            piece, current, column = piece[room:], "\t", TAB
        current, column = current + piece, column + len(piece)
    return "\n".join([*lines, *([current] if current.strip() else [])])


def full(title: str, name: str, attributes: Attributes, wide: bool) -> str:
    """One object as qstat -f shows it."""
    lines = []
    for key, value in attributes.items():
        if key == "Variable_List":
            value = ",".join(f"{name}={re.sub(',', chr(92) + ',', each)}" for name, each in value.items())
        parts = {f"{key}.{part}": each for part, each in value.items()} if isinstance(value, Mapping) else {key: value}
        for label, each in parts.items():
            line = f"    {label} = {each}"
            lines.append(line if wide else folded(line))
    return "\n".join([f"{title}: {name}", *lines]) + "\n\n"


def table(jobs: Iterable[tuple[str, Attributes]]) -> str:
    """qstat without options."""
    lines = ["Job id            Name             User              Time Use S Queue",
             "----------------  ---------------- ----------------  -------- - -----"]
    for name, job in jobs:
        used = job.get("resources_used", {}).get("walltime") if "resources_used" in job else None
        user = job["Job_Owner"].partition("@")[0]
        lines.append(f"{shortened(name, 17):17} {shortened(job['Job_Name'], 16):16} {user:16}  "
                     f"{'0' if used is None else used:>8} {job['job_state']} {job['queue']:16} ")
    return "\n".join(lines) + "\n" if len(lines) > 2 else ""


def shortened(text: str, width: int) -> str:
    return text if len(text) < width else text[:width - 2] + "*"


def wide_table(jobs: Iterable[tuple[str, Attributes]], *, nodes: bool, comments: bool, one_line: bool) -> str:
    """qstat -a, with -n, -s and -1."""
    lines = ["", f"{SERVER}: ",
             "                                                            Req'd  Req'd   Elap",
             "Job ID          Username Queue    Jobname    SessID NDS TSK Memory Time  S Time",
             "--------------- -------- -------- ---------- ------ --- --- ------ ----- - -----"]
    for name, job in jobs:
        resources = job["Resource_List"]
        elapsed = job["resources_used"]["walltime"][:5] if "resources_used" in job else " -- "
        limit = resources.get("walltime", " -- ")[:5]
        user = job["Job_Owner"].partition("@")[0]
        line = (f"{name:15} {user:8} {job['queue']:8} {shortened(job['Job_Name'], 11):10} "
                f"{job.get('session_id', '--') if 'session_id' in job else '  -- ':>6} {resources['nodect']:>3} "
                f"{resources['ncpus']:>3} {'  --':6} {limit:>5} {job['job_state']} {elapsed:>5}")
        hosts = job.get("exec_host", " -- ")
        if nodes and one_line:
            line += f" {hosts}"
        lines.append(line)
        if nodes and not one_line:
            lines.append(f"   {hosts}")
        if comments and job.get("comment"):
            lines.append(f"   {job['comment']}")
    return "\n".join(lines) + "\n" if len(lines) > 5 else ""


def queue_table(queues: Attributes, counts: Attributes) -> str:
    lines = ["Queue              Max   Tot Ena Str   Que   Run   Hld   Wat   Trn   Ext Type",
             "---------------- ----- ----- --- --- ----- ----- ----- ----- ----- ----- ----"]
    for name, rules in queues.items():
        count = counts[name]
        flags = [("yes" if rules.get(flag, True) else "no").rjust(3) for flag in ("enabled", "started")]
        lines.append(f"{name:16} {0:5} {sum(count.values()):5} {' '.join(flags)} {count['Q']:5} {count['R']:5} "
                     f"{count['H']:5} {count['W']:5} {0:5} {count['E']:5} Exe*")
    return "\n".join(lines) + "\n"


def state_count(count: Attributes) -> str:
    return ("Transit:0 Queued:{Q} Held:{H} Waiting:{W} Running:{R} Exiting:{E} Begun:0 ").format(**count)


def queue_attributes(rules: Attributes, count: Attributes) -> dict[str, Any]:
    """A queue as qstat -Qf shows it."""
    result: dict[str, Any] = {"queue_type": "Execution", "total_jobs": str(sum(count.values())),
                              "state_count": state_count(count)}
    for name in ("resources_max", "resources_default"):
        if name in rules:
            result[name] = {key: str(value) for key, value in rules[name].items()}
    result |= {"enabled": str(rules.get("enabled", True)), "started": str(rules.get("started", True))}
    return result


def node_attributes(name: str, node: Attributes, as_text: bool) -> dict[str, Any]:
    """A node as pbsnodes -a shows it; in JSON without what is zero, and with times as numbers."""
    busy = node["used"]["ncpus"] >= node["total"]["ncpus"]
    state = "job-exclusive" if node["exclusive"] else "job-busy" if busy else "free"
    used = {key: f"{value}kb" if key == "mem" else str(value) for key, value in node["used"].items()}
    if as_text:
        assigned = {"accelerator_memory": "0kb", "hbmem": "0kb", "mem": "0kb", "naccelerators": "0", "ncpus": "0",
                    "ngpus": "0", "vmem": "0kb", **used}
    else:
        assigned = {key: used[key] for key in sorted(used) if node["used"][key]}
    available = {"arch": "linux", "host": name, "mem": f"{node['total']['mem']}kb",
                 "ncpus": str(node["total"]["ncpus"]), "ngpus": str(node["total"]["ngpus"]), "vnode": name}
    moments = {key: moment_or_number(node[source], as_text)
               for key, source in (("last_state_change_time", "changed"), ("last_used_time", "last_used"))
               if node[source]}
    jobs = {"jobs": ", ".join(f"{job}/0" for job in node["jobs"]) if as_text else list(node["jobs"])}
    return {"Mom": node["mom"], "ntype": "PBS", "state": state, "pcpus": "2", **(jobs if node["jobs"] else {}),
            "resources_available": available, "resources_assigned": assigned, "resv_enable": "True",
            "sharing": "default_shared", "license": "l", **moments}


def moment_or_number(when: int, as_text: bool) -> str:
    return time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(when)) if as_text else str(when)


def node_text(name: str, node: Attributes) -> str:
    lines = [name]
    for key, value in node_attributes(name, node, as_text=True).items():
        parts = {f"{key}.{part}": each for part, each in value.items()} if isinstance(value, Mapping) else {key: value}
        lines += [f"     {label} = {each}" for label, each in parts.items()]
    return "\n".join(lines) + "\n\n"
