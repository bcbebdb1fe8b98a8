"""Mistakes that mypy and pyright must report: each line that ends with `# wrong`, and no other."""

import torch
from torch import nn

import samplewise as sw

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def mistakes(losses: torch.Tensor, g: sw.Gradients, step: sw.Step, update: sw.Update) -> None:
    sw.gradients(losses, "model")  # wrong
    sw.gradients(losses, model, createGraph=True)  # wrong
    sw.clip("1.0")  # wrong
    sw.gradient(losses, model)  # wrong
    g.norms().keys()  # wrong
    g.norms(by="parameter").mean()  # wrong
    g.norms(by="layer")  # wrong
    sw.gradients(losses, model, strategy="fast")  # wrong
    sw.gradients(losses, model, interacting=True)  # wrong
    sw.clip(1.0, mode="smooth")  # wrong
    sw.drop(1, score="loss")  # wrong
    sw.align({}, kind="angle")  # wrong
    sw.diagnostics.signal_to_noise(g, by="module")  # wrong
    sw.normalize("median")  # wrong
    sw.backward(losses, model, through=3)  # wrong
    sw.scan(model, nn.MSELoss(), [losses], microbatch="all")  # wrong
    sw.suspects("run", score="aum")  # wrong
    sw.suspects("run", also=["norm"])  # wrong
    g.sum().norm()  # wrong
    print(g[3].shape)  # wrong
    step.sampels = 3  # wrong
    step.samples = "all"  # wrong
    sw.Step(model, optimizer)  # wrong
    sw.Step(model, optimizer, 3)  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), transforms=[1.0])  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), tail="last")  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), on_nonfinite="warn")  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), precision="fp16")  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), compile="always")  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), parallel="dp")  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), record=["losses"])  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), interacting="warn")  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), microbatch="all")  # wrong
    sw.Step(model, optimizer, nn.MSELoss(), scheduler=torch.optim.lr_scheduler.StepLR)  # wrong
    update.loss.backward()  # wrong
    sw.Privacy(epsilon=3.0, delta=1e-5, updates=9, sample_rate=0.1, clip=sw.normalize())  # wrong
    sw.Privacy(epsilon=3.0, delta=1e-5, updates=9, sample_rate=0.1, clip=1.0, accountant="prv")  # wrong
    sw.Trainer(step).fit(losses, epoch=3)  # wrong
    sw.Trainer(step).fit([losses], epochs="2ep")  # wrong
    sw.Trainer(step, log_every=0.5)  # wrong
    sw.Trainer(step, save="some")  # wrong
    sw.Trainer(step, metrics={"loss": 3})  # wrong
    sw.callbacks.ModelCheckpoint(mode="low")  # wrong
