"""Loops with Accelerate and with Fabric on the small problem, as a user writes them.

python loops.py <json with the framework and the arguments of its loop>
"""

import json
import os
import signal
import sys
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from lightning.fabric import Fabric
from small_problem import LR, SAMPLES, dataset, network
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Subset

import samplewise as sw


def parts(batch_size, samples, dtype=torch.float64, dropout=0.0):
    model = network(dtype, dropout)
    loader = DataLoader(sw.Indexed(Subset(dataset(dtype), range(samples))), batch_size=batch_size)
    return model, torch.optim.SGD(model.parameters(), LR), loader


def results(model, batch, transforms, through, scalar, window=None, factor=1):
    """`sw.backward` of a batch. `window`: number of samples of the update that the loss is divided by, times factor."""
    x, y, *_ = batch
    logits = model(x)
    denominator = len(x) if window is None else window * factor
    if scalar:
        loss = F.cross_entropy(logits, y, reduction="sum") / denominator
        return sw.backward(loss, model, logits, transforms, through, denominator=denominator)
    losses = F.cross_entropy(logits, y, reduction="none")
    return sw.backward(losses, model, None, transforms, through, denominator=denominator)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


def kill_if(step, after):
    if step == after:
        os.kill(os.getpid(), signal.SIGKILL)


def accelerate_loop(
    directory,
    batch_size=4,
    accumulate=1,
    epochs=1,
    samples=SAMPLES,
    clip=0.7,
    scalar=False,
    plain=False,
    dropout=0.0,
    precision="no",
    dtype="float64",
    sharded=False,
    kill_after=None,
    resume=False,
):
    """Returns the parameters by name."""
    AcceleratorState._reset_state(reset_partial_state=not PartialState().use_distributed)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision)
    if sharded:  # Accelerate itself selects FSDP on GPUs only
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
        AcceleratorState._shared_state |= {"distributed_type": DistributedType.FSDP, "fsdp_plugin": plugin}
    model, optimizer, loader = accelerator.prepare(*parts(batch_size, samples, getattr(torch, dtype), dropout))
    ledger = sw.Ledger(f"{directory}/run")
    accelerator.register_for_checkpointing(ledger)
    transforms = [sw.clip(clip)] if clip else []
    first = 0
    update = 0
    if resume:
        accelerator.load_state(f"{directory}/checkpoint")
        first, update = torch.load(f"{directory}/progress.pt")
    torch.manual_seed(5)
    step = 0
    for epoch in range(first, epochs):
        for start, batch in zip(range(0, samples, batch_size * accelerator.num_processes), loader, strict=True):
            per_update = batch_size * accumulate * accelerator.num_processes
            window = min(per_update, samples - start // per_update * per_update)
            with accelerator.accumulate(model):
                if plain:
                    accelerator.backward(F.cross_entropy(model(batch[0]), batch[1]))
                else:
                    factor = 1 / (accumulate * accelerator.num_processes)
                    exact = None if accumulate == 1 else window
                    stats = results(model, batch, transforms, accelerator, scalar, exact, factor)
                    ledger.record(stats, batch, update=update, epoch=epoch)
                optimizer.step()
                optimizer.zero_grad()
                update += accelerator.sync_gradients
            step += 1
            kill_if(step, kill_after)
        if accelerator.is_main_process:
            torch.save((epoch + 1, update), f"{directory}/progress.pt")
        if not sharded:
            accelerator.save_state(f"{directory}/checkpoint")
    ledger.flush()
    return parameters(accelerator.unwrap_model(model))


def fabric_loop(directory, batch_size=4, samples=SAMPLES, dtype="float64", dropout=0.0, **settings):
    """Returns the parameters by name. Fabric converts the outputs of a float64 model to the default dtype."""
    made = parts(batch_size, samples, getattr(torch, dtype), dropout)
    with default_dtype(getattr(torch, dtype)):
        return fabric_epochs(directory, made, batch_size, samples, **settings)


def fabric_epochs(
    directory,
    made,
    batch_size,
    samples,
    accumulate=1,
    epochs=1,
    clip=0.7,
    scalar=False,
    plain=False,
    precision="64-true",
    strategy="auto",
    devices=1,
    kill_after=None,
    resume=False,
):
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision)
    fabric.launch()
    model, optimizer, loader = made
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    ledger = sw.Ledger(f"{directory}/run")
    transforms = [sw.clip(clip)] if clip else []
    state = {"model": model, "optimizer": optimizer, "ledger": ledger, "epoch": 0, "update": 0}
    if resume:
        fabric.load(f"{directory}/checkpoint.ckpt", state)
    torch.manual_seed(5)
    step = 0
    for epoch in range(state["epoch"], epochs):
        for k, batch in enumerate(loader):
            last = (k + 1) % accumulate == 0 or k + 1 == len(loader)
            per_update = batch_size * accumulate * fabric.world_size
            window = min(per_update, samples - k // accumulate * per_update)
            with nullcontext() if last else fabric.no_backward_sync(model):
                if plain:
                    fabric.backward(F.cross_entropy(model(batch[0]), batch[1]))
                else:
                    exact = None if accumulate == 1 else window
                    stats = results(model, batch, transforms, fabric, scalar, exact, 1 / fabric.world_size)
                    ledger.record(stats, batch, update=state["update"], epoch=epoch)
            if last:
                optimizer.step()
                optimizer.zero_grad()
                state["update"] += 1
            step += 1
            kill_if(step, kill_after)
        state["epoch"] = epoch + 1
        fabric.save(f"{directory}/checkpoint.ckpt", state)
    ledger.flush()
    return parameters(model.module)


LOOPS = {"accelerate": accelerate_loop, "fabric": fabric_loop}


def parameters(model):
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in model.named_parameters()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = json.loads(sys.argv[1])
    trained = LOOPS[arguments.pop("framework")](**arguments)
    if os.environ.get("RANK", "0") == "0":
        torch.save(trained, f"{arguments['directory']}/parameters.pt")
