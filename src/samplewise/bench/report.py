"""The report of `samplewise bench`: its schema and validation, the environment in it, and its tables.

schema.json is a JSON Schema. `check_report` knows the keywords that it uses, so that no package is needed.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from samplewise.bench.measure import clock_of
from samplewise.core.files import other_version, read_json
from samplewise.core.memory import device_function, processor_name
from samplewise.core.package import installed_version
from samplewise.core.text import Table, plural

FORMAT = "samplewise-bench"
VERSION = 1
SCHEMA: dict[str, Any] = json.loads(files("samplewise.bench").joinpath("schema.json").read_text(encoding="utf-8"))
REMEDY = "Make it again with samplewise bench --json FILE."
SHOWN = 60  # characters of a wrong value
MEASURABLE = 2**24  # bytes of resident memory; smaller differences of the CPU say nothing

TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "null": (type(None),),
}


class ReportError(ValueError):
    """A report does not follow the schema."""


# --- validation -------------------------------------------------------------------------------------------------------


def read_report(path: Path) -> dict[str, Any]:
    """Content of a report; ReportError in one sentence if it does not follow the schema."""
    report = read_json(path, ReportError, REMEDY)
    check_report(report, path.name)
    return report


def check_report(report: Any, name: str) -> None:
    """Raise ReportError for the first value that does not follow the schema."""
    if isinstance(report, dict) and report.get("format") == FORMAT and report.get("version") != VERSION:
        raise ReportError(other_version(name, report.get("version"), VERSION))
    for place, need, value in violations(report, SCHEMA):
        shown = json.dumps(value)
        shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "…"
        raise ReportError(
            f"{name} must be a report of samplewise bench, in which {place} {need}; found {shown}. {REMEDY}"
        )


def violations(value: Any, schema: dict[str, Any], place: str = "the report") -> Iterator[tuple[str, str, Any]]:
    """Yield (place, what must hold there, value) for each violation."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    names = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    # True is an int in Python, and no number in JSON. NaN and infinity are not JSON.
    is_type = type(value) in {kind for name in names for kind in TYPES[name]}
    if not is_type or value in (float("inf"), -float("inf")) or value != value:
        yield place, f"must be of type {' or '.join(names)}", value
    elif isinstance(value, dict):
        for key in schema["required"]:
            if key not in value:
                yield place, f"must have the key {key!r}", sorted(value)
        for key, item in value.items():
            where = f"{place}.{key}" if place != "the report" else key
            if key in schema["properties"]:
                yield from violations(item, schema["properties"][key], where)
            else:
                yield place, f"must have no other keys than {', '.join(schema['properties'])}", key
    elif isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield place, f"must have at least {schema['minItems']} item(s)", value
        for k, item in enumerate(value):
            yield from violations(item, schema["items"], f"{place}[{k}]")
    elif isinstance(value, str):
        if len(value) > schema.get("maxLength", len(value)):
            yield place, f"must have at most {schema['maxLength']} characters", value
        if not re.search(schema.get("pattern", ""), value):
            yield place, f"must match {schema['pattern']}", value
        if value not in schema.get("enum", [value]):
            yield place, f"must be one of {', '.join(schema['enum'])}", value
    elif value is not None and not isinstance(value, bool):
        if value < schema.get("minimum", value):
            yield place, f"must be at least {schema['minimum']}", value
        if value not in schema.get("enum", [value]):
            yield place, f"must be {schema['enum'][0]}", value


def problems(report: dict[str, Any]) -> list[str]:
    """One line for each wrong result, and for each measurement that has failed."""
    lines = []
    for zoo in report["zoo"]:
        wrong = [case for case in zoo["exceptions"] if case["outcome"] == "wrong"]
        lines += [f"zoo, {zoo['precision']}: {case['case']} is wrong: {case['reason']}" for case in wrong]
    if not any(zoo["right"] + zoo["refused"] for zoo in report["zoo"]):
        lines.append("zoo: nothing was compared")
    transforms = report["transforms"]
    lines += [f"{exact['update']}: {exact['reason']}" for exact in transforms["exact"] if not exact["right"]]
    groups = {"transforms": transforms}
    for network in report["networks"]:
        place = f"{network['network']}, {network['precision']}"
        groups[place] = network
        error = network["norm_error"]
        if network["error"] is None and (error is None or error > network["tolerance"]):
            shown = "NaN" if error is None else f"{error:.0e}"
            lines.append(f"{place}: norms must be right up to {network['tolerance']:.0e}; found an error of {shown}")
    for place, group in groups.items():
        errors = [f"{update['update']}: {update['error']}" for update in group["updates"] if update["error"]]
        lines += [f"{place}: {error}" for error in [*filter(None, [group["error"]]), *errors]]
    return lines


# --- environment ------------------------------------------------------------------------------------------------------


def today() -> str:
    return datetime.now(UTC).date().isoformat()


def describe_environment(device: torch.device) -> dict[str, Any]:
    """Versions, processor and device. No host name, no user name, no paths."""
    name = device_function(device, "get_device_name")
    memory = device_function(device, "mem_get_info")
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    clock = "processor time of one thread" if clock_of(device).__name__ == "process_time" else "wall time"
    return {
        "samplewise": installed_version(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "clock": clock,
        "device": device.type,
        "name": device.type if name is None else name(device),
        "memory_bytes": None if memory is None else memory(device)[1],
        "runtime": _runtime(device),
        "driver": _driver() if device.type == "cuda" else None,
        "capability": None if capability is None else ".".join(map(str, capability)),
    }


def _runtime(device: torch.device) -> str | None:
    if device.type != "cuda":
        return None
    return f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"


def _driver() -> str | None:
    """Version of NVIDIA's driver, if nvidia-smi is installed."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    with suppress(OSError, subprocess.SubprocessError):
        query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        return lines[0] if lines else None
    return None


# --- tables -----------------------------------------------------------------------------------------------------------


def tables(report: dict[str, Any]) -> list[Table]:
    """Tables of a report, for the command line and for docs/gpu.md."""
    return [_zoo_table(report), _transforms_table(report), _networks_table(report)]


def heading(report: dict[str, Any]) -> str:
    """Device, versions and date in one line."""
    e = report["environment"]
    device = e["processor"] if e["device"] == "cpu" else e["name"]
    details = [
        None if e["memory_bytes"] is None else f"{e['memory_bytes'] / 2**30:.0f} GiB",
        e["runtime"],
        None if e["driver"] is None else f"driver {e['driver']}",
        plural(e["threads"], "thread") if e["device"] == "cpu" else None,
        f"torch {e['torch']}",
        f"samplewise {e['samplewise']}",
        f"Python {e['python']}",
        e["system"],
        report["date"],
    ]
    return ", ".join([f"{device} ({e['device']})", *filter(None, details)])


def _zoo_table(report: dict[str, Any]) -> Table:
    rows = [
        [
            zoo["precision"],
            f"{zoo['relative']:.0e}, {zoo['floor']:.0e}",
            *(str(zoo[k]) for k in ("right", "refused", "wrong", "not_run")),
        ]
        for zoo in report["zoo"]
    ]
    notes = [
        f"{e['outcome']}, {zoo['precision']}: {e['case']}: {e['reason']}"
        for zoo in report["zoo"]
        for e in zoo["exceptions"]
    ]
    header = ("precision", "tolerance", "right", "refused", "wrong", "not run")
    return Table(header, rows, "Small models, compared with one backward pass per sample", notes)


def _transforms_table(report: dict[str, Any]) -> Table:
    transforms = report["transforms"]
    updates = {update["update"]: update for update in transforms["updates"]}
    exact = {verdict["update"]: "right" if verdict["right"] else "wrong" for verdict in transforms["exact"]}
    rows = [
        [name, exact.get(name, ""), *_cells(update, transforms["updates"], report)] for name, update in updates.items()
    ]
    notes = [f"{v['update']}: {v['reason']}" for v in transforms["exact"] if not v["right"]]
    notes += filter(None, [transforms["error"]])
    title = f"Updates of a small ViT, {transforms['samples']} samples, float32; gradients in {transforms['dtype']}"
    return Table(("transforms", "gradients", *COLUMNS), rows, title, notes)


def _networks_table(report: dict[str, Any]) -> Table:
    rows = []
    for network in report["networks"]:
        size = f"{network['network']}, {network['parameters'] / 1e6:.1f} M"
        error = "" if network["norm_error"] is None else f"{network['norm_error']:.0e}"
        start = [size, network["precision"], str(network["samples"]), error]
        if network["error"] is not None:
            rows.append([*start, network["error"], *[""] * len(COLUMNS)])
        rows += [
            [*start, update["update"], *_cells(update, network["updates"], report)] for update in network["updates"]
        ]
    header = ("network", "precision", "samples", "error of norms", "update", *COLUMNS)
    return Table(header, rows, "Networks of real size" if not report["quick"] else "Tiny networks (--quick)")


COLUMNS = ("ms", "of plain", "host waits", "memory, MB", "of plain")


def _cells(update: dict[str, Any], updates: list[dict[str, Any]], report: dict[str, Any]) -> list[str]:
    """Cells of `COLUMNS`; the first one of `updates` is the plain one."""
    if update["error"] is not None:
        return [update["error"], *[""] * (len(COLUMNS) - 1)]
    on_cpu = report["environment"]["device"] == "cpu"
    peak, plain = update["peak_bytes"], updates[0]["peak_bytes"]
    is_measured = peak is not None and plain is not None and plain >= (MEASURABLE if on_cpu else 1)
    waits = "not applicable" if on_cpu else "not counted"
    return [
        "" if update["ms"] is None else f"{update['ms']:.1f}",
        "" if update["ratio"] is None else f"{update['ratio']:.2f}",
        waits if update["waits"] is None else f"{update['waits']:g}",
        f"{peak / 1e6:.0f}" if is_measured else "",
        f"{peak / plain:.2f}" if is_measured else "",
    ]
