"""Log of releases: replay, divergence, branches, files."""

import json
import os

import pytest
from private_runs import plan

from samplewise.errors import PrivacyError
from samplewise.privacy.spending import LOG_FILE, Release, Spending, load_secret, remove_secret, save_secret
from samplewise.privacy.streams import Secret


def opened(directory, settings=None):
    spending = Spending()
    spending.open(directory, settings or {"clip": 1.0})
    return spending


def release(update, digest="a", branch=0, key="k"):
    return Release(update, branch, key, f"{digest}{update}")


def test_releases_are_counted_once(tmp_path):
    spending = opened(tmp_path)
    for update in range(3):
        assert not spending.known(release(update))
        spending.add(release(update))
        assert spending.known(release(update))
    spending.close()
    again = opened(tmp_path)
    assert again.count == 3 and again.known(release(2)) and not again.known(release(3))
    assert not again.known(release(2, branch=1)) and not again.known(release(2, key="other"))
    again.add(release(2, branch=1))
    assert again.count == 4
    again.close()


def test_another_sum_with_the_same_noise_is_refused(tmp_path):
    spending = opened(tmp_path)
    spending.add(release(0))
    with pytest.raises(PrivacyError, match="update 0 must be repeated exactly, because its noise was used before"):
        spending.known(release(0, digest="b"))
    assert spending.diverged == {("k", 0)} and spending.count == 1
    spending.close()
    again = opened(tmp_path)
    assert again.diverged == {("k", 0)} and again.count == 1
    again.close()


def test_releases_are_on_disk_when_add_returns(tmp_path):
    spending = opened(tmp_path)
    spending.add(release(0))
    first, second = (tmp_path / LOG_FILE).read_text().splitlines()  # read by another file object, without a close
    assert json.loads(first)["settings"] == {"clip": 1.0}
    assert json.loads(second) == {"update": 0, "branch": 0, "key": "k", "digest": "a0"}
    spending.close()


@pytest.mark.parametrize("cut", range(1, 12, 5))
def test_a_line_that_is_cut_off_is_removed(tmp_path, cut):
    spending = opened(tmp_path)
    spending.add(release(0))
    spending.add(release(1))
    spending.close()
    path = tmp_path / LOG_FILE
    path.write_bytes(path.read_bytes()[:-cut])
    again = opened(tmp_path)
    assert again.count == 1
    again.add(release(1))
    again.close()
    assert len(path.read_text().splitlines()) == 3


def test_settings_are_compared(tmp_path):
    opened(tmp_path, {"clip": 1.0, "updates": 3}).close()
    with pytest.raises(PrivacyError, match=r"found clip=2.0 after 1.0. Use these, or start a new run directory"):
        opened(tmp_path, {"clip": 2.0, "updates": 3})


def test_settings_of_another_format_are_refused(tmp_path):
    pytest.importorskip("dp_accounting")
    settings = {"clip": 0.5, "unit": "user", "mode": "flat", "by": None, "samples": None}
    opened(tmp_path, {**plan()._settings, **settings}).close()
    with pytest.raises(PrivacyError, match=r"found clip='clip\(0.5\)' after 0.5. Use these, or start a new run"):
        opened(tmp_path, plan()._settings)


def test_settings_of_a_plan_survive_json():
    pytest.importorskip("dp_accounting")
    settings = plan(by="parameter", clip=1 / 3, sample_rate=0.1 + 0.2)._settings
    assert json.loads(json.dumps(settings)) == settings


def test_assumed_releases():
    spending = Spending()
    spending.assume(5)
    spending.assume(3)
    assert spending.count == 5
    spending.add(release(5))
    assert spending.count == 6


def test_key_files(tmp_path):
    assert load_secret(tmp_path) is None
    secret = Secret.new()
    save_secret(tmp_path / "run", secret)
    assert load_secret(tmp_path / "run") == secret
    assert (tmp_path / "run" / "privacy.key").stat().st_mode & 0o777 == 0o600
    remove_secret(tmp_path / "run")
    remove_secret(tmp_path / "run")  # no error if there is none
    assert load_secret(tmp_path / "run") is None


# --- damaged files ----------------------------------------------------------------------------------------------------

LINES = ['{"settings": {"clip": 1.0}}', '{"update": 0, "branch": 0, "key": "k", "digest": "a0"}']
ODD = {
    "an empty line": (2, ""),
    "no object": (2, "[1, 2]"),
    "a number": (2, "3"),
    "null": (2, "null"),
    "deep": (2, "[" * 100_000),
    "no digest": (2, '{"update": 0, "branch": 0, "key": "k"}'),
    "an update that is a text": (2, '{"update": "0", "branch": 0, "key": "k", "digest": "a0"}'),
    "an update that is a bool": (2, '{"update": true, "branch": 0, "key": "k", "digest": "a0"}'),
    "a negative update": (2, '{"update": -1, "branch": 0, "key": "k", "digest": "a0"}'),
    "a branch that is a list": (2, '{"update": 0, "branch": [], "key": "k", "digest": "a0"}'),
    "a key that is null": (2, '{"update": 0, "branch": 0, "key": null, "digest": "a0"}'),
    "a note without a key": (2, '{"diverged": 0, "branch": 0}'),
    "not UTF-8": (2, b'{"update": 0, "branch": 0, "key": "\xff", "digest": "a0"}'),
    "no settings": (1, LINES[1]),
    "settings that are a list": (1, '{"settings": []}'),
    "other settings": (1, "{}"),
    "zeros": (1, "\0" * 40),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_lines_are_refused(tmp_path, name):
    number, line = ODD[name]
    lines = [text.encode() for text in LINES]
    lines[number - 1] = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / LOG_FILE
    content = b"\n".join(lines) + b'\n{"update": 1'  # and a last line that is cut off
    path.write_bytes(content)
    with pytest.raises(
        PrivacyError, match=rf"(?s)must have one JSON object per line, .*in line {number}, .*Restore it"
    ):
        opened(tmp_path)
    assert path.read_bytes() == content


def test_two_sums_with_the_same_noise_in_a_log(tmp_path):
    path = tmp_path / LOG_FILE
    path.write_text("\n".join([*LINES, LINES[1], ""]))
    again = opened(tmp_path)
    assert again.count == 1  # written twice, released once
    again.close()
    path.write_text("\n".join([*LINES, LINES[1].replace("a0", "b0"), ""]))
    with pytest.raises(PrivacyError, match="must have one release for each draw of noise; found two sums for update 0"):
        opened(tmp_path)


def test_a_log_that_is_a_directory(tmp_path):
    (tmp_path / LOG_FILE).mkdir()
    with pytest.raises(PrivacyError, match=r"privacy\.jsonl must be a file that can be read; found: .*Restore it"):
        opened(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\n", b"short", b"x" * 31, b"x" * 33, b"x" * 64])
def test_a_damaged_key(tmp_path, content):
    (tmp_path / "privacy.key").write_bytes(content)
    message = (
        rf"must be the key of the run, 32 bytes; found: .*found {len(content)} bytes.* or remove it: draws and noise"
    )
    with pytest.raises(PrivacyError, match=message):
        load_secret(tmp_path)


def test_a_key_that_is_a_directory(tmp_path):
    (tmp_path / "privacy.key").mkdir()
    with pytest.raises(PrivacyError, match=r"must be the key of the run, 32 bytes; found: .*[Dd]irectory"):
        load_secret(tmp_path)


@pytest.mark.parametrize("point", ["fsync", "replace"])
def test_a_crash_while_the_key_is_written(tmp_path, monkeypatch, point):
    """The earlier key stays, or there is none; what is left of the new one can be read by its owner only."""
    before = Secret.new()
    for existing in (None, before):
        if existing is not None:
            save_secret(tmp_path, existing)
        with monkeypatch.context() as patched:
            patched.setattr(os, point, lambda *arguments: (_ for _ in ()).throw(OSError("the machine stops here")))
            with pytest.raises(OSError, match="stops here"):
                save_secret(tmp_path, Secret.new())
        assert load_secret(tmp_path) == existing
        assert all(path.stat().st_mode & 0o777 == 0o600 for path in tmp_path.iterdir())
    after = Secret.new()
    save_secret(tmp_path, after)
    assert load_secret(tmp_path) == after and [path.name for path in tmp_path.iterdir()] == ["privacy.key"]


def test_no_part_of_a_key_stays(tmp_path):
    (tmp_path / ".privacy.key.partial").write_bytes(b"x" * 32)
    remove_secret(tmp_path)
    assert list(tmp_path.iterdir()) == []
