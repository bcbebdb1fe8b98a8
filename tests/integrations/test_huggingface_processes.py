"""A Hugging Face Trainer that is killed and resumed, and one on two ranks."""

import os
import signal
import socket
import sys
from pathlib import Path

import forks
import pytest
import torch

import samplewise as sw

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
START = f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]; from huggingface_models import *\n"

TRAIN = """
import os, signal
from types import SimpleNamespace
from busy_process import Hooks, SecondModel
from transformers import TrainerCallback

class Busy(TrainerCallback):
    # hooks and another model in the process

    def on_step_end(self, args, state, control, model=None, **kwargs):
        hooks.on_update(model)
        SecondModel().on_update(SimpleNamespace(index=state.global_step))

class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == int(sys.argv[2]):
            os.kill(os.getpid(), signal.SIGKILL)

hooks = Hooks()
options = {"num_train_epochs": 3, "optim": "adamw_torch", "learning_rate": 0.01, "save_strategy": "steps"}
args = arguments(sys.argv[1], 2, 2, save_steps=2, eval_strategy="steps", eval_steps=1, **options)
model = bert(dropout=0.2)
if sys.argv[4] == "lora":
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS"))
trainer = PerSampleTrainer(
    model,
    args,
    train_dataset=sw.Indexed(classes(10)),
    eval_dataset=classes(6),
    compute_metrics=lambda found: {"accuracy": (found.predictions.argmax(-1) == found.label_ids).mean()},
    ledger=sw.Ledger(rows_per_file=3),
    transforms=[sw.clip(0.5)],
    callbacks=[Kill(), Busy()],
)
trainer.train(resume_from_checkpoint=sys.argv[3] == "resume")
torch.save(vector(trainer.model), sys.argv[1] + "/end.pt")
"""


def run(code, *arguments, **environment):
    command = [sys.executable, "-W", "ignore", "-c", START + code, *map(str, arguments)]
    env = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in environment.items()}
    return forks.Popen(command, env=env, stdout=-1, stderr=-1)


def finished(process):
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors.decode()[-3000:]


@pytest.mark.parametrize("model", ["whole", "lora"])
def test_killed_in_the_second_epoch_and_resumed(tmp_path, model):
    code, errors = finished(run(TRAIN, tmp_path / "whole", -1, "new", model))
    assert code == 0, errors
    assert finished(run(TRAIN, tmp_path / "killed", 5, "new", model))[0] == -signal.SIGKILL
    code, errors = finished(run(TRAIN, tmp_path / "killed", -1, "resume", model))
    assert code == 0, errors
    assert torch.equal(torch.load(tmp_path / "whole/end.pt"), torch.load(tmp_path / "killed/end.pt"))
    assert sw.read_ledger(tmp_path / "killed").equals(sw.read_ledger(tmp_path / "whole"))
    assert sw.read_ledger(tmp_path / "whole").num_rows == 30


RANKS = """
name, task, ranks, clipped, unit = sys.argv[2:7]
made, data = TASKS[task]
batch = 4 // int(ranks)
options = {"ddp_backend": "gloo"} if ranks == "2" else {}
data = [{**sample, "prompt": f"prompt {k % 5}"} for k, sample in enumerate(data(16))]
units = {"sample": sw.per("sample"), "group": sw.per("group", key="prompt"), "constant": sw.per(10)}
trainer = recorded(
    made(), data, sys.argv[1] + "/" + name, batch, 2, transforms=[sw.clip(0.3)] if clipped == "True" else [],
    options=options | {"logging_strategy": "steps", "logging_steps": 1}, trainer=SequentialTrainer,
    aggregate=units.get(unit),
)
if trainer.args.process_index == 0:
    torch.save([line for line in trainer.state.log_history if "loss" in line], sys.argv[1] + f"/{name}.log")
    torch.save(vector(trainer.accelerator.unwrap_model(trainer.model)), sys.argv[1] + f"/{name}.pt")
"""


def run_on_one_and_two_ranks(code, directory, task, *arguments):
    code_of_one, errors = finished(run(code, directory, "one", task, 1, *arguments))
    assert code_of_one == 0, errors
    on_two_ranks(code, directory, "two", task, 2, *arguments)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize(
    ("task", "unit"), [("bert", "token"), *(("llama", unit) for unit in ("token", "sample", "group", "constant"))]
)
def test_two_ranks_give_the_update_of_one(task, unit, clipped, tmp_path):
    run_on_one_and_two_ranks(RANKS, tmp_path, task, clipped, unit)
    first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("one", "two"))
    assert (first - second).norm() <= 1e-6 * first.norm()
    ledgers = [sw.read_ledger(tmp_path / name) for name in ("one", "two")]
    rows = [{(row["epoch"], row["update"], row["id"]): row for row in ledger.to_pylist()} for ledger in ledgers]
    assert rows[0].keys() == rows[1].keys()
    assert len(rows[0]) == ledgers[1].num_rows == 16
    for key, row in rows[0].items():
        for name in ("loss", "norm", "weight"):
            assert rows[1][key][name] == pytest.approx(row[name], rel=2e-4, abs=1e-5), (key, name)
    assert any(row["weight"] < 1 for row in rows[0].values()) == clipped
    logs = [torch.load(tmp_path / f"{name}.log") for name in ("one", "two")]
    names = ["norm_median", "norm_p95", "largest_id", *(["clipped"] if clipped else [])]
    for one, two in zip(*logs, strict=True):
        for name in (f"samplewise/{name}" for name in names):
            assert two[name] == pytest.approx(one[name], rel=2e-4)


UNITS = """
import torch.nn.functional as F

name, task, ranks = sys.argv[2:5]

def squared(z, y):
    return F.cross_entropy(z, y, reduction="none").square()

CRITERIA = {
    "mean": lambda z, y, n: squared(z, y).mean(),
    "sum": lambda z, y, n: squared(z, y).sum(),
    "items": lambda z, y, n: squared(z, y).sum() / n,
}

class Own(SequentialTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        return CRITERIA[task](model(**inputs).logits, labels, num_items_in_batch)

def function(outputs, labels, num_items_in_batch=None):
    return squared(outputs.logits, labels).sum() / num_items_in_batch

own = {"compute_loss_func": function, "trainer": SequentialTrainer} if task == "function" else {"trainer": Own}
options = {"learning_rate": 0.0} | ({"ddp_backend": "gloo"} if ranks == "2" else {})
model = bert()
if task == "items":
    model.accepts_loss_kwargs = True  # so that the Trainer counts items, also that of transformers 4
recorded(
    model, classes(16), sys.argv[1] + "/" + name, 4 // int(ranks), 2, options=options, transforms=[sw.clip(0.3)], **own
)
"""


@pytest.mark.parametrize("task", ["mean", "sum", "items", "function"])
def test_units_of_own_losses_on_two_ranks(task, tmp_path):
    """The Trainer multiplies the loss of compute_loss_func by the number of ranks, not that of an own compute_loss."""
    run_on_one_and_two_ranks(UNITS, tmp_path, task)
    first, second = (sw.read_ledger(tmp_path / name).sort_by("id") for name in ("one", "two"))
    assert first["norm"].to_pylist() == pytest.approx(second["norm"].to_pylist(), rel=1e-4)
    weights = second["weight"].to_pylist()
    assert first["weight"].to_pylist() == pytest.approx(weights, rel=1e-4) and min(weights) < 1


# --- privacy ---------------------------------------------------------------------------------------------------------

PRIVATE = """
import os, signal
from unittest import mock
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from samplewise.privacy.private_update import PrivateUpdate

directory, moment, number, seed, mutant = sys.argv[1:6]

class Kill(TrainerCallback):
    # "before" the parameters change, after the release is recorded; or "after" the update

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if (moment, state.global_step) == ("before", int(number)):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        if (moment, state.global_step - 1) == ("after", int(number)):
            os.kill(os.getpid(), signal.SIGKILL)

ranks = int(os.environ.get("WORLD_SIZE", "1"))
options = {"ddp_backend": "gloo"} if ranks > 1 else {}
if not mutant:
    options = {"optim": "adamw_torch", "save_strategy": "steps", "save_steps": 2}
model = llama()
if not mutant:
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.2))
plan = {"noise_multiplier": 0.5, "delta": 1e-3, "updates": 9, "sample_rate": 0.25, "clip": 0.2, "accountant": "rdp"}
exact = PrivateUpdate._noise_std
with mock.patch.object(PrivateUpdate, "_noise_std", lambda self: exact(self) / (ranks if mutant == "less" else 1)):
    trainer = PerSampleTrainer(
        model, arguments(directory, 2, **options), train_dataset=texts(12), callbacks=[Kill()],
        privacy=sw.Privacy(**plan, seed=int(seed) if seed else None),
    )
    trainer.train(resume_from_checkpoint=moment == "resume")
assert trainer.privacy.spent().updates == 9
if trainer.args.process_index == 0:
    torch.save(vector(trainer.accelerator.unwrap_model(trainer.model)), directory + "/end.pt")
"""


def releases(directory):
    """Lines of the log without that of the settings."""
    return (directory / "privacy.jsonl").read_text().splitlines()[1:]


@pytest.mark.parametrize(("moment", "seed"), [("before", 1), ("after", 1), ("before", "")])
def test_a_killed_private_training_repeats_its_updates(moment, seed, tmp_path):
    """Adapters with dropout, killed after the checkpoint of four updates. Without a seed, the key is that of a file."""
    killed = tmp_path / "killed"
    assert finished(run(PRIVATE, killed, moment, 5, seed, ""))[0] == -signal.SIGKILL
    before = releases(killed)
    assert len(before) == 6  # the last one is recorded
    assert (killed / "privacy.key").exists() == (not seed)
    code, errors = finished(run(PRIVATE, killed, "resume", 0, seed, ""))
    assert code == 0, errors
    assert releases(killed)[:6] == before and len(releases(killed)) == 9
    assert not (killed / "privacy.key").exists()
    if seed:
        code, errors = finished(run(PRIVATE, tmp_path / "whole", "never", 0, seed, ""))
        assert code == 0, errors
        assert releases(killed) == releases(tmp_path / "whole")
        assert torch.equal(torch.load(killed / "end.pt"), torch.load(tmp_path / "whole/end.pt"))


def on_two_ranks(code, *arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        run(code, *arguments, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        for rank in range(2)
    ]
    for returned, errors in map(finished, ranks):
        assert returned == 0, errors


@pytest.mark.parametrize("mutant", ["none", "less"])
def test_private_updates_of_two_ranks_equal_those_of_one(mutant, tmp_path):
    """Draws of which a rank has no samples are among them. Mutant "less": noise / number of ranks."""
    code, errors = finished(run(PRIVATE, tmp_path / "one", "never", 0, 1, "none"))
    assert code == 0, errors
    on_two_ranks(PRIVATE, tmp_path / "two", "never", 0, 1, mutant)
    first, second = (torch.load(tmp_path / name / "end.pt") for name in ("one", "two"))
    assert ((first - second).abs().max().item() <= 1e-6) == (mutant == "none")
