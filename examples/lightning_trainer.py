"""Lightning: clip the gradient of each sample, and find wrong labels. Lines that are new end with `# +`."""

import tempfile

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import samplewise as sw  # +
from samplewise.integrations.lightning import PerSample  # +

SAMPLES, FEATURES, CLASSES, WRONG = 600, 10, 4, 30

torch.manual_seed(0)
labels = torch.randint(CLASSES, (SAMPLES,))
x = 2 * torch.randn(CLASSES, FEATURES)[labels] + torch.randn(SAMPLES, FEATURES)
flipped = torch.randperm(SAMPLES)[:WRONG]
labels[flipped] = (labels[flipped] + 1) % CLASSES  # wrong labels
data: Dataset[tuple[Tensor, ...]] = TensorDataset(x, labels)


class Classifier(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, CLASSES))

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> dict[str, Tensor]:
        x, y, *_ = batch
        logits = self.net(x)
        losses = F.cross_entropy(logits, y, reduction="none")  # + instead of loss = F.cross_entropy(logits, y)
        return {"loss": losses, "outputs": logits, "labels": y}  # + instead of return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


directory = tempfile.TemporaryDirectory()  # in your script: a permanent one
run = directory.name
trainer = L.Trainer(
    max_epochs=5,
    accelerator="cpu",
    accumulate_grad_batches=2,
    default_root_dir=run,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[PerSample(transforms=[sw.clip(1.0)], ledger=sw.Ledger(run), exact_accumulation=True)],  # +
)
data = sw.Indexed(data)  # +
trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))

found = sw.suspects(sw.read_ledger(run)).top(WRONG)  # +
print(f"{torch.isin(found, flipped).sum()} of {WRONG} wrong labels are among the {WRONG} most suspicious samples")  # +
directory.cleanup()
