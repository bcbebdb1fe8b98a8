"""The job scripts of docs/clusters.md, run as a scheduler does: started, stopped by SIGTERM and started again.

The parameters at the end are those of a run that was not stopped, bit for bit.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

import samplewise as sw

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PAGE = (ROOT / "docs" / "clusters.md").read_text()
BLOCKS = re.findall(r"^```(bash|yaml)$\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SRUN, TORCHRUN = (code for language, code in BLOCKS if language == "bash")
MANIFEST, CHANGE = (code for language, code in BLOCKS if language == "yaml")
SCRIPT = [str(HERE / "held.py"), str(ROOT / "examples" / "preemptible.py")]
HOLD = 33  # index of the update after which the signal comes: in the middle of an epoch of 10
slow = pytest.mark.slow  # each start of Python takes seconds

COMMANDS = {  # on PATH
    "python": f'exec "{sys.executable}" "$@"',
    "torchrun": f'exec "{sys.executable}" -m torch.distributed.run "$@"',
    "srun": f'exec "{sys.executable}" "{HERE / "srun.py"}" "$@"',
    # `scontrol show hostnames` and `scontrol requeue`, which writes the job to the queue.
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" >> "$QUEUE"; else echo 127.0.0.1; echo other; fi',
}


@pytest.fixture
def environment(tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, code in COMMANDS.items():
        (commands / name).write_text(f"#!/bin/bash\n{code}\n")
        (commands / name).chmod(0o755)
    path = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "EPOCHS": "6"}


def parameters(run):
    return [tensor.tolist() for tensor in sw.load_checkpoint(run)["model"].values()]


def start(command, environment, ready=None, count=1, stop=None):
    """Exit code of a command. `stop` is called with the process when `count` lines are in the file `ready`."""
    hold = {} if ready is None else {"HOLD": str(HOLD), "READY": str(ready)}
    process = subprocess.Popen(command, env=environment | hold, start_new_session=True)
    try:
        until = time.monotonic() + 300
        while stop is not None and process.poll() is None and time.monotonic() < until:
            lines = ready.read_text().splitlines() if ready.exists() else []
            if len(lines) == count:
                stop(process, [tuple(map(int, line.split())) for line in lines])
                break
            time.sleep(0.05)
        return process.wait(timeout=300)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# --- SLURM -----------------------------------------------------------------------------------------------------------


def job(script, tmp_path, environment, ranks):
    """Environment variables and command of a job, and a function that returns the environment of a run."""
    (tmp_path / "train.sbatch").write_text(script)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = ranks if "torchrun" in script else 1
    job_id = 10_000 * 7 + (port - 20_000) % 10_000
    variables = {
        "SLURM_JOB_ID": str(job_id),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NTASKS": str(ranks),
        "SLURM_NNODES": str(nodes),
        "RANKS": "1",
        "QUEUE": str(tmp_path / "queue"),
    }
    return ["bash", str(tmp_path / "train.sbatch"), *SCRIPT], environment | variables


def to_ranks(process, ranks):
    """As SLURM does with the tasks of a step."""
    for rank, _ in ranks:
        os.kill(rank, signal.SIGTERM)


def to_script(process, ranks):
    process.send_signal(signal.SIGTERM)


def to_all(process, ranks):
    """Torchrun and its ranks."""
    for rank, agent in ranks:
        os.kill(agent, signal.SIGTERM)
        os.kill(rank, signal.SIGTERM)


@slow
@pytest.mark.parametrize(
    ("script", "ranks", "stop", "code"),
    [
        (SRUN, 1, to_ranks, 143),
        (SRUN, 2, to_script, 143),
        (TORCHRUN, 2, to_all, 1),
    ],
    ids=["srun, rank", "srun, script", "torchrun, all"],
)
def test_slurm(script, ranks, stop, code, tmp_path, environment):
    command, variables = job(script, tmp_path, environment, ranks)
    queue = tmp_path / "queue"
    assert start(command, variables | {"RUN": str(tmp_path / "whole")}) == 0
    assert not queue.exists()

    stopped = variables | {"RUN": str(tmp_path / "run")}
    assert start(command, stopped, tmp_path / "ready", ranks, stop) == code
    assert queue.read_text() == f"{variables['SLURM_JOB_ID']}\n"
    assert max((tmp_path / "run" / "checkpoints").iterdir()).name == f"update-{HOLD + 1:09d}.ckpt"
    assert start(command, stopped) == 0
    assert queue.read_text().count("\n") == 1
    assert parameters(tmp_path / "run") == parameters(tmp_path / "whole")


@slow
@pytest.mark.parametrize("script", [SRUN, TORCHRUN], ids=["srun", "torchrun"])
def test_slurm_does_not_requeue_after_an_error(script, tmp_path, environment):
    command, variables = job(script, tmp_path, environment, 1)
    (tmp_path / "wrong.py").write_text("raise ValueError('wrong')\n")
    assert start([*command[:2], str(tmp_path / "wrong.py")], variables | {"RUN": str(tmp_path / "run")}) == 1
    assert not (tmp_path / "queue").exists()


# --- Kubernetes ------------------------------------------------------------------------------------------------------


def container(manifest, tmp_path, environment):
    """Command and environment of the container; its volume is mounted in `tmp_path`."""
    pod = manifest["spec"]["template"]["spec"]
    (train,) = pod["containers"]
    (mount,) = train["volumeMounts"]
    (volume,) = pod["volumes"]
    assert mount["name"] == volume["name"]
    assert train["command"][-1] == "preemptible.py"
    values = {entry["name"]: entry["value"] for entry in train["env"]}
    values = {name: value.replace(mount["mountPath"], str(tmp_path), 1) for name, value in values.items()}
    return [*train["command"][:-1], *SCRIPT], environment | values


def is_ignored(manifest, code):
    """True if a pod that ends with this code is replaced without counting for backoffLimit."""
    assert manifest["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    for rule in manifest["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes")
        if codes and codes["operator"] == "In" and code in codes["values"]:
            return rule["action"] == "Ignore"
    return False


@slow
@pytest.mark.parametrize("kind", ["volume", "upload"])
def test_kubernetes(kind, tmp_path, environment):
    manifest = yaml.safe_load(MANIFEST)
    if kind == "upload":
        pod = manifest["spec"]["template"]["spec"]
        change = yaml.safe_load(CHANGE)["spec"]["template"]["spec"]
        pod["containers"][0] |= change["containers"][0]
        pod["volumes"] = change["volumes"]
        assert pod["volumes"] == [{"name": "runs", "emptyDir": {}}]
    store = {"UPLOAD": f"file://{tmp_path}/store/digits"} if kind == "upload" else {}

    def pod_on(machine):
        command, variables = container(manifest, tmp_path / machine, environment)
        assert ("UPLOAD" in variables) == (kind == "upload")
        return command, variables | store

    whole, variables = container(yaml.safe_load(MANIFEST), tmp_path / "whole", environment)
    assert start(whole, variables) == 0

    command, variables = pod_on("first")
    code = start(command, variables, tmp_path / "ready", 1, to_script)  # Python is the first process of the pod
    assert is_ignored(manifest, code) and not is_ignored(manifest, 1)
    last = "first" if kind == "volume" else "second"  # an emptyDir is empty again
    command, variables = pod_on(last)
    assert start(command, variables) == 0
    assert parameters(tmp_path / last / "digits") == parameters(tmp_path / "whole" / "digits")


def test_the_page_and_the_script_agree():
    text = (ROOT / "examples" / "preemptible.py").read_text()
    for line in ('exists="resume"', "sys.exit(128 + signal.Signals[result.signal])"):
        assert line in text and line in PAGE
