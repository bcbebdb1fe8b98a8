"""Schema and validation of reports of `samplewise bench`, and docs/gpu.md, which is made from them."""

import copy
import json
import runpy
import subprocess
from pathlib import Path

import jsonschema
import pytest
import torch

from samplewise.bench import report as reports
from samplewise.bench.report import SCHEMA, ReportError, check_report, problems, read_report, violations

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "docs" / "gpu_reports").glob("*.json"))
REFERENCE = json.loads((ROOT / "docs" / "gpu_reports" / "cpu-reference.json").read_text())


def changed(**values):
    """The reference with other values, by path: changed(**{"zoo.0.right": -1})."""
    report = copy.deepcopy(REFERENCE)
    for path, value in values.items():
        *places, last = [int(place) if place.isdigit() else place for place in path.split(".")]
        target = report
        for place in places:
            target = target[place]
        target[last] = value
    return report


def paths(value, place=()):
    """Paths of all values in a report."""
    if place:
        yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from paths(item, (*place, key))


def test_the_schema_is_a_json_schema():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_the_reports_of_the_repository_follow_the_schema(file):
    report = read_report(file)
    jsonschema.validate(report, SCHEMA)
    assert not report["quick"], "times of tiny networks say nothing about a device"


OTHERS = [None, "x" * 300, "2026-11-19", -1, 0.5, True, [], {}, {"more": 1}]


def test_validation_is_that_of_a_validator_of_json_schemas():
    """Every value of a report, replaced by values of all types, and every key left out."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    small = changed(zoo=REFERENCE["zoo"][:1], networks=REFERENCE["networks"][:1])
    small["networks"][0]["updates"] = small["networks"][0]["updates"][:1]
    refused = 0
    for place in paths(small):
        for other in [*OTHERS, ...]:
            report = copy.deepcopy(small)
            target = report
            for key in place[:-1]:
                target = target[key]
            if other is ... and isinstance(target, dict):
                del target[place[-1]]
            elif other is not ...:
                target[place[-1]] = other
            expected = validator.is_valid(report)
            assert (next(violations(report, SCHEMA), None) is None) == expected, (place, other)
            refused += not expected
    assert refused > 500


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ([], "in which the report must be of type object; found []."),
        ({}, "in which the report must have the key 'format'; found []."),
        (changed(format="bench"), 'in which format must be one of samplewise-bench; found "bench".'),
        (changed(version=2), "a.json must have format version 1; found 2, which this version of samplewise does not"),
        (changed(**{"networks.0.updates.1.ratio": "fast"}), "in which networks[0].updates[1].ratio must be of type nu"),
        (changed(**{"zoo.0.right": True}), "in which zoo[0].right must be of type integer; found true."),
        (changed(**{"zoo.0.right": -1}), "in which zoo[0].right must be at least 0; found -1."),
        (changed(seconds=float("nan")), "in which seconds must be of type number; found NaN."),
        (changed(date="today"), "in which date must match "),
        (changed(zoo=[]), "in which zoo must have at least 1 item(s); found []."),
        (
            changed(**{"environment.host": "mine"}),
            "in which environment must have no other keys than samplewise, torch",
        ),
        (
            changed(**{"environment.name": "x" * 300}),
            "in which environment.name must have at most 200 characters; found",
        ),
    ],
)
def test_a_broken_report_gives_one_sentence(report, message, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(report))
    with pytest.raises(ReportError) as found:
        read_report(tmp_path / "a.json")
    assert message in str(found.value) and "\n" not in str(found.value)


def test_a_file_that_is_no_json(tmp_path):
    (tmp_path / "a.json").write_text("<html>")
    with pytest.raises(
        ReportError, match=r"a\.json must be readable JSON; found JSONDecodeError: .* Make it again with"
    ):
        read_report(tmp_path / "a.json")


def test_problems_of_a_report():
    assert problems(REFERENCE) == []
    case = {"case": "lstm", "outcome": "wrong", "reason": "off by 1"}
    unfit = {"case": "gru", "outcome": "not run", "reason": "no kernel"}
    report = changed(
        **{
            "zoo.0.exceptions": [case, unfit],
            "transforms.exact.1.right": False,
            "transforms.exact.1.reason": "ViT: off",
            "transforms.error": "RuntimeError: no",
            "networks.0.norm_error": 0.5,
            "networks.1.norm_error": None,
            "networks.2.error": "OutOfMemoryError: x",
            "networks.2.updates.0.error": "RuntimeError: y",
        }
    )
    name = [f"{n['network']}, {n['precision']}" for n in REFERENCE["networks"]]
    assert problems(report) == [
        "zoo, float64: lstm is wrong: off by 1",
        "sw.clip(c): ViT: off",
        f"{name[0]}: norms must be right up to 1e-03; found an error of 5e-01",
        f"{name[1]}: norms must be right up to 1e-03; found an error of NaN",
        "transforms: RuntimeError: no",
        f"{name[2]}: OutOfMemoryError: x",
        f"{name[2]}: plain: RuntimeError: y",
    ]


# --- environment of a CUDA device -------------------------------------------------------------------------------------


@pytest.fixture
def nvidia(monkeypatch):
    """A GPU as torch.cuda describes it; nothing is computed on it."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**33, 2**34))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.version, "cuda", "12.6")
    monkeypatch.setattr(reports.shutil, "which", lambda name: f"bin/{name}")


def test_the_environment_of_a_gpu(nvidia, monkeypatch):
    done = subprocess.CompletedProcess([], 0, stdout="550.54.15\n550.54.15\n")
    monkeypatch.setattr(reports.subprocess, "run", lambda command, **options: done)
    environment = reports.describe_environment(torch.device("cuda"))
    names = "device", "name", "memory_bytes", "runtime", "driver", "capability", "clock"
    expected = ["cuda", "Tesla T4", 2**34, "CUDA 12.6", "550.54.15", "7.5", "wall time"]
    assert [environment[name] for name in names] == expected
    report = {**REFERENCE, "environment": environment}
    check_report(report, "report")
    assert reports.heading(report).startswith("Tesla T4 (cuda), 16 GiB, CUDA 12.6, driver 550.54.15, torch ")


def test_a_driver_that_cannot_be_asked_is_left_out(nvidia, monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, 10)

    monkeypatch.setattr(reports.subprocess, "run", run)
    assert reports.describe_environment(torch.device("cuda"))["driver"] is None
    monkeypatch.setattr(reports.shutil, "which", lambda name: None)
    assert reports.describe_environment(torch.device("cuda"))["driver"] is None


# --- docs/gpu.md ------------------------------------------------------------------------------------------------------

PAGE = runpy.run_path(str(ROOT / "docs" / "gpu.py"))


def test_the_page_is_up_to_date():
    assert PAGE["TARGET"].read_text(encoding="utf-8") == PAGE["page"](), (
        "docs/gpu.md must show the reports: `make docs`"
    )


def test_a_page_without_a_report_of_a_gpu_says_so():
    empty = PAGE["page"]([])
    assert empty.count("**No report yet.**") == 1 and "CPU, for reference" not in empty
    with_cpu = PAGE["page"]([REFERENCE])
    assert with_cpu.count("**No report yet.**") == 1 and "### CPU, for reference" in with_cpu


def test_a_report_of_a_gpu_is_shown():
    """Text of a report does not become markup of the page."""
    gpu = changed(**{"environment.device": "cuda", "environment.name": "Tesla | <b>T4</b> [a](b)"})
    page = PAGE["page"]([REFERENCE, gpu])
    assert "No report yet" not in page
    assert "### Tesla \\| &lt;b&gt;T4&lt;/b&gt; \\[a](b)\n" in page
    first = page.partition("### Tesla")[2]
    assert "not counted" in first and "| GPT-2 small" in first and "### CPU, for reference" in first


def test_a_quick_report_and_a_broken_one_are_refused(tmp_path):
    file = tmp_path / "a.json"
    file.write_text(json.dumps(changed(quick=True)))
    with pytest.raises(SystemExit, match=r"a\.json must be made without --quick"):
        PAGE["read_reports"](tmp_path)
    file.write_text(json.dumps(changed(zoo=[])))
    with pytest.raises(SystemExit, match=r"a\.json must be a report of samplewise bench, in which zoo must have"):
        PAGE["read_reports"](tmp_path)
