"""Files of a run directory and their format version."""

import json

import pytest
from small import loader, make

from samplewise.errors import CheckpointError


def run_json(run):
    return json.loads((run / "run.json").read_text())


def test_run_json_has_a_format_version(tmp_path):
    make(tmp_path).fit(loader(), epochs=1)
    assert run_json(tmp_path)["format_version"] == 1
    assert not list(tmp_path.glob(".*"))


NEWER = "it was written by a newer one; upgrade with pip install --upgrade samplewise."
OTHER = "use the version that wrote it, or start a new run directory."


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(
    ("version", "shown", "remedy"),
    [(2, "2", NEWER), (0, "0", OTHER), ("1", "'1'", OTHER), (True, "True", OTHER), (None, "none", OTHER)],
)
def test_another_version_is_refused_before_anything_is_changed(tmp_path, version, shown, remedy, resume):
    make(tmp_path).fit(loader(), epochs=1)
    about = {**run_json(tmp_path), "format_version": version}
    (tmp_path / "run.json").write_text(json.dumps(about))
    log = (tmp_path / "log.jsonl").read_bytes()
    with pytest.raises(CheckpointError) as error:
        make(tmp_path).fit(loader(), epochs=2, resume=resume)
    assert str(error.value) == (
        f"{tmp_path / 'run.json'} must have format version 1; found {shown}, which this version of samplewise does "
        f"not read: {remedy}"
    )
    assert run_json(tmp_path) == about and (tmp_path / "log.jsonl").read_bytes() == log
    assert not (tmp_path / "run.lock").exists()


@pytest.mark.parametrize("content", ["[]", "{}", '"text"'])
def test_a_run_json_without_a_version_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"run\.json must have format version 1; found none, which this version"):
        make(tmp_path).fit(loader(), epochs=1)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\xff", b"[" * 100_000])
def test_a_run_json_that_is_no_json_is_refused(tmp_path, content):
    (tmp_path / "run.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"run\.json must be readable JSON; found \w+: .* Restore it from a"):
        make(tmp_path).fit(loader(), epochs=1)
