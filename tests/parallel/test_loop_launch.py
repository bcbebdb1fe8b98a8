"""Started by torchrun: the command line, a user's own script, one whose rank is killed, and one whose rank hangs."""

import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forks
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from script import main
from spread_models import flat, loss_fn, net, own_batches
from torch.distributed import HashStore

import samplewise as sw
from samplewise.cli.main import app
from samplewise.errors import DistributedError
from samplewise.loop.checkpoint.directory import Checkpoints
from samplewise.parallel import launch
from samplewise.parallel.launch import agree_on_prefix, resolve_device

SCRIPT = Path(__file__).with_name("script.py")
RECIPE = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def model():
    return nn.Linear(5, 3)

def data():
    x = torch.randn(30, 5)
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4, shuffle=True)
"""


def run(*command, code=0):
    told = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forks.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=600, env=told)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done.stdout, done.stderr


LAUNCHER = """
import multiprocessing, pathlib, sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
multiprocessing.set_forkserver_preload(["torch._dynamo", "samplewise"])
options = dict(min_nodes=1, max_nodes=1, nproc_per_node=2, rdzv_backend="c10d", rdzv_endpoint="localhost:0")
config = LaunchConfig(**options, run_id="test", max_restarts=1, monitor_interval=0.1, start_method="forkserver")
if __name__ == "__main__":
    from script import main
    elastic_launch(config, main)(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
"""


def torchrun(*options):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *options]


def losses(run):
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "epoch"]


@pytest.mark.parametrize("late", [0, 2])
def test_group_has_only_ranks_that_are_alive(late):
    """In what an earlier start has left behind."""
    store = HashStore()
    agreed_before = _meet(store, late=None)
    for _ in range(3):
        agreed = _meet(store, late)
        assert len(set(agreed)) == 1 and agreed[0] != agreed_before[0]
        agreed_before = agreed


def _meet(store, late, size=3):
    def come(rank):
        time.sleep(0.1 * (rank == late))
        return agree_on_prefix(store, rank, size, 60.0)

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(come, range(size)))


def test_timeout_without_other_ranks_is_reported():
    store = HashStore()
    store.set("id/1", "dead")
    message = "all 2 processes .* must join the rendezvous; found that rank 0 has waited for 0 seconds. Check the logs"
    with pytest.raises(DistributedError, match=message):
        agree_on_prefix(store, 0, 2, 0.1)


def test_auto_takes_the_accelerator(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert resolve_device("auto") == torch.device("xpu")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "own", "backend"),
    [
        ("cpu", "cpu", "gloo"),
        ("mps", "mps", "gloo"),
        ("cuda", "cuda:1", "cpu:gloo,cuda:nccl"),
        ("cuda:0", "cuda:0", "cpu:gloo,cuda:nccl"),
        ("xpu", "xpu:1", "cpu:gloo,xpu:xccl"),
    ],
)
def test_device_and_backend_of_a_rank(monkeypatch, device, own, backend):
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = launch._of_local_rank(torch.device(device))
    assert found == torch.device(own) and launch._backend(found) == backend


def test_one_process_joins_no_group():
    assert sw.parallel.join("cpu", timeout=5.0) == torch.device("cpu") and not torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds, or None; found 0"):
        sw.parallel.join("cpu", timeout=0)


def trained(parallel=None, port=None):
    """On ranks: as torchrun starts them, without a process group."""
    if port is not None:
        dist.destroy_process_group()
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    step = sw.Step(model, optimizer, loss_fn, samples=6, transforms=[sw.clip(0.5)], parallel=parallel)
    step.run(own_batches(3))
    return flat(model), dist.get_world_size() if dist.is_initialized() else 1


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_step_joins_the_ranks_of_torchrun(parallel):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    team = Ranks(2)
    results = team.run(trained, parallel, port)
    team.close()
    expected, one = trained(parallel)
    assert one == 1  # without torchrun, `parallel` initializes no process group
    for parameters, ranks in results:
        assert ranks == 2
        torch.testing.assert_close(parameters, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_the_command_line_starts_processes(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE)
    train = ["-m", "samplewise", "train", recipe, "--samples", 7, "--epochs", 2, "--run"]
    out, _ = run(*train, tmp_path / "two", "--processes", 2)
    assert out.splitlines()[0] == "2 epochs are done: 10 updates in all"
    assert len(out.splitlines()) == 3  # told by one of them
    with pytest.raises(SystemExit, match="0"):
        app([str(word) for word in (*train[2:], tmp_path / "one")])
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


@pytest.mark.slow
def test_function_continues_from_the_last_checkpoint_after_a_rank_was_killed(tmp_path):
    """As under torchrun, with ranks that are forked and not started."""
    launcher = tmp_path / "launcher.py"
    launcher.write_text(f"import sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n{LAUNCHER}")
    run(launcher, tmp_path / "killed", 9)
    assert_went_on(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("update", [0, 6, 9, 13, 20])
def test_script_continues_from_the_last_checkpoint_after_a_rank_was_killed(update, tmp_path):
    run(*torchrun("--max-restarts", 1), SCRIPT, tmp_path / "killed", update)
    assert_went_on(tmp_path)


def assert_went_on(tmp_path):
    assert (tmp_path / "killed" / "killed").exists()
    expected = [p.detach() for p in main(tmp_path / "undisturbed").parameters()]
    state, path = Checkpoints(tmp_path / "killed" / "checkpoints").latest()
    assert path.name == "update-000000021.ckpt" and path.is_dir()
    for found, right in zip(state["model"].values(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-11)
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-9)


@pytest.mark.slow
def test_a_rank_that_hangs_is_not_waited_for_ever(tmp_path):
    _, told = run(*torchrun(), SCRIPT, tmp_path / "hangs", 3, 1, code=1)
    assert (
        "DistributedError: all 2 ranks must take part in every collective; found that all_reduce failed on rank 0"
        in told
    )
    assert "Look for a rank that died, left its loop early, or is blocked in another call" in told
