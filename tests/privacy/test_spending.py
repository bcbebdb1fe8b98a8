"""Log of releases: replay, divergence, branches, files."""

import json

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
    assert json.loads(first) == {"settings": {"clip": 1.0}}
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


def test_settings_of_a_plan_survive_json():
    pytest.importorskip("dp_accounting")
    settings = plan(by="parameter", clip=1 / 3, sample_rate=0.1 + 0.2).settings
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
