"""Metadata and content of a release. `make dist` also installs the wheel into clean environments."""

import re
import zipfile
from datetime import date
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import distributions as dist
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import samplewise

ROOT = dist.ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built without a network."""
    (path,) = dist.build(tmp_path_factory.mktemp("wheel"), "--wheel", "--no-isolation")
    return path


def test_the_wheel_has_the_package_and_its_metadata(wheel):
    dist.check_wheel(wheel)


@pytest.mark.parametrize("name", ["samplewise/__pycache__/a.pyc", "tests/test_a.py", "samplewise/.cache"])
def test_a_wheel_with_other_files_is_refused(wheel, tmp_path, name):
    changed = tmp_path / wheel.name
    changed.write_bytes(wheel.read_bytes())
    with zipfile.ZipFile(changed, "a") as archive:
        archive.writestr(name, "")
    with pytest.raises(AssertionError, match=re.escape(f"missing: []; not wanted: [{name!r}]")):
        dist.check_wheel(changed)


def test_the_version_is_that_of_the_project():
    assert samplewise.__version__ == dist.PROJECT["version"]


def test_every_extra_has_a_smoke_test():
    text = Path(dist.SMOKE).read_text()
    assert [e for e in dist.PROJECT["optional-dependencies"] if e != "dev" and f"def {e}()" not in text] == []


def read_yaml(path):
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


# --- pinned versions --------------------------------------------------------------------------------------------------


def pins(name):
    """Version of each package in a file of pins, by normalized name."""
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    versions = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(package): version for package, version in versions.items()}


def requirements(package, extra):
    """Requirements of an installed package; those of the project are read from pyproject.toml."""
    if package == "samplewise":
        return dist.PROJECT["optional-dependencies"][extra] if extra else dist.PROJECT["dependencies"]
    try:
        return distribution(package).requires or []
    except PackageNotFoundError:
        return []


def test_the_lock_has_every_package_of_the_development_environment():
    packages, waiting = set(), [("samplewise", ""), ("samplewise", "dev")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in packages:
            continue
        packages.add((name, extra))
        for requirement in map(Requirement, requirements(name, extra)):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(requirement.name), wanted) for wanted in ("", *requirement.extras)]
    missing = {name for name, _ in packages} - {"samplewise"} - pins("lock.txt").keys()
    assert missing == set(), f"lock.txt must have them; run make lock: {sorted(missing)}"


def test_the_lock_agrees_with_the_constraints():
    constraints, locked = pins("constraints.txt"), pins("lock.txt")
    differ = {name: version for name, version in constraints.items() if locked.get(name, version) != version}
    assert differ == {}, "run make lock"


# --- changelog and citation -------------------------------------------------------------------------------------------

HEADINGS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def changelog():
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def releases():
    """(version, date) of each release, the newest first."""
    return re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", changelog(), re.MULTILINE)


def test_the_changelog_has_unreleased_changes_first_and_known_headings():
    titles = re.findall(r"^## (.*)$", changelog(), re.MULTILINE)
    assert titles == ["[Unreleased]", *(f"[{version}] - {date}" for version, date in releases())]
    assert set(re.findall(r"^### (.*)$", changelog(), re.MULTILINE)) <= HEADINGS


def test_the_newest_release_is_the_version_of_the_project():
    assert releases()[0][0] == dist.PROJECT["version"]


def test_the_citation_is_of_the_newest_release():
    citation = read_yaml("CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()  # required by the format
    assert (citation["version"], citation["date-released"]) == (releases()[0][0], date.fromisoformat(releases()[0][1]))
    assert citation["license"] == dist.PROJECT["license"]


PAGES = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md")


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_have_targets(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", (ROOT / page).read_text(encoding="utf-8"))
    assert [link for link in links if not (ROOT / link).exists()] == []


# --- GitHub -----------------------------------------------------------------------------------------------------------


def test_the_workflow_runs_the_targets_of_the_makefile():
    workflow = read_yaml(".github/workflows/ci.yml")
    jobs = workflow["jobs"]
    systems = jobs["test"]["strategy"]["matrix"]["os"]
    assert [system.partition("-")[0] for system in systems] == ["ubuntu", "macos", "windows"]
    commands = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert "make test PYTHON=python" in commands["test"]
    assert "make site PYTHON=python" in commands["site"]
    assert "make dist PYTHON=python" in commands["dist"]


def test_the_bug_report_asks_for_the_output_of_doctor():
    fields = {field["id"]: field for field in read_yaml(".github/ISSUE_TEMPLATE/bug_report.yml")["body"]}
    environment = fields["environment"]
    assert "samplewise doctor" in environment["attributes"]["label"] and environment["validations"]["required"]


@pytest.mark.parametrize("name", ["bug_report", "feature_request", "gpu_report"])
def test_issue_forms_have_what_github_requires(name):
    form = read_yaml(f".github/ISSUE_TEMPLATE/{name}.yml")
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in fields)
