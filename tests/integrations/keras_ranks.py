"""One clipped update of a Keras model in a hand-written loop on two gloo ranks; `fit` is refused there.

Arguments: directory for the store and the results. Each rank writes its parameters to rank-N.pt.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from keras_double import Linear, Squared, double, keras
from torch.nn.parallel import DistributedDataParallel

import samplewise as sw
from samplewise.integrations.keras import PerSample


def build():
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((5,)), Linear(6, torch.tanh), Linear(2)])


def data():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(8, width, dtype=torch.float64, generator=generator) for width in (5, 2)]


def update(model, x, y):
    """One update with clipped gradients; the model may be a DistributedDataParallel."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = model(x)
    loss = Squared()(y, outputs)
    sw.backward(loss, model, outputs=outputs, transforms=[sw.clip(1.0)], denominator=len(x))
    optimizer.step()


def rank_main(rank, directory):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=2)
    with double():
        model = build()
        x, y = (t[rank::2] for t in data())
        update(DistributedDataParallel(model), x, y)
        torch.save([v.value.data for v in model.trainable_variables], f"{directory}/rank-{rank}.pt")
        PerSample.of(model).compile("sgd", "mse")
        try:
            model.fit(x.numpy(), y.numpy(), verbose=0)
        except sw.DistributedError as refused:
            Path(f"{directory}/rank-{rank}.txt").write_text(str(refused))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1],), nprocs=2)
