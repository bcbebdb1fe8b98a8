"""Metadata and content of a release. `make dist` also installs the wheel into clean environments."""

import re
import zipfile
from pathlib import Path

import distributions as dist
import pytest

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
