"""Training loops for tests of `sw.audit`: twenty with a fault, and right ones.

Each is a function of a `Task`, in which the audited model and its data are made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loop = Callable[["Task"], None]


@dataclass
class Task:
    """Model and data of a loop: 20 samples in batches of 4, so that a window of 2 batches leaves a ragged end."""

    seed: int = 0
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.x = torch.randn(20, 6)
        self.y = torch.randint(0, 5, (20,))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)

    def batches(self, size: int = 4) -> list[tuple[Tensor, Tensor]]:
        return list(zip(self.x.split(size), self.y.split(size), strict=True))

    def regression(self) -> None:
        """A model with one output (B, 1) and targets (B,)."""
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.y = self.x.sum(1) + torch.randn(20)

    def tokens(self) -> None:
        """A language model without shift: 6 tokens, of which the rows have 1 to 6."""
        self.x = torch.randint(0, 5, (20, 6))
        lengths = torch.arange(20) % 6 + 1
        self.y = torch.where(torch.arange(6) < lengths[:, None], self.x.roll(1, 1), -100)
        self.model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)


def token_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction=reduction)


# --- loops with a fault -----------------------------------------------------------------------------------------------

FAULTS: dict[str, tuple[Loop, str]] = {}  # name -> loop, code of its finding


def fault(code: str) -> Callable[[Loop], Loop]:
    def register(loop: Loop) -> Loop:
        FAULTS[loop.__name__] = loop, code
        return loop

    return register


@fault("microbatch-weights")
def mean_of_means(task: Task) -> None:
    task.tokens()
    batches = task.batches()[:4]
    for k in range(0, 4, 2):
        for x, y in batches[k : k + 2]:
            (token_loss(task.model(x), y) / 2).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("weight-sum")
def not_divided_by_accumulation(task: Task) -> None:
    for i, (x, y) in enumerate(task.batches()[:4]):
        F.cross_entropy(task.model(x), y).backward()
        if i % 2 == 1:
            task.optimizer.step()
            task.optimizer.zero_grad()


@fault("weight-sum")
def divided_by_padded_length(task: Task) -> None:
    task.tokens()
    for x, y in task.batches():
        loss = token_loss(task.model(x), y, "sum") / y.numel()
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("short-window")
def constant_divisor_at_the_end(task: Task) -> None:
    for i, (x, y) in enumerate(task.batches()):
        (F.cross_entropy(task.model(x), y) / 2).backward()
        if i % 2 == 1 or i == 4:
            task.optimizer.step()
            task.optimizer.zero_grad()


@fault("first-window")
def step_when_index_is_a_multiple(task: Task) -> None:
    for i, (x, y) in enumerate(task.batches()):
        (F.cross_entropy(task.model(x), y) / 2).backward()
        if i % 2 == 0:
            task.optimizer.step()
            task.optimizer.zero_grad()


@fault("unapplied")
def last_window_never_applied(task: Task) -> None:
    for i, (x, y) in enumerate(task.batches()):
        (F.cross_entropy(task.model(x), y) / 2).backward()
        if i % 2 == 1:
            task.optimizer.step()
            task.optimizer.zero_grad()


@fault("mixed-epochs")
def last_window_applied_to_the_next_epoch(task: Task) -> None:
    for _ in range(2):
        for i, (x, y) in enumerate(task.batches()):
            (F.cross_entropy(task.model(x), y) / 3).backward()
            if i % 2 == 1:
                task.optimizer.step()
                task.optimizer.zero_grad()


@fault("stale-gradients")
def zero_grad_is_missing(task: Task) -> None:
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()


@fault("discarded")
def zero_grad_for_each_microbatch(task: Task) -> None:
    for i, (x, y) in enumerate(task.batches()[:4]):
        task.optimizer.zero_grad()
        (F.cross_entropy(task.model(x), y) / 2).backward()
        if i % 2 == 1:
            task.optimizer.step()


@fault("discarded")
def zero_grad_before_step(task: Task) -> None:
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.zero_grad(set_to_none=False)
        task.optimizer.step()


@fault("repeated-step")
def two_steps_per_window(task: Task) -> None:
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("scheduler-per-microbatch")
def scheduler_for_each_microbatch(task: Task) -> None:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(task.optimizer, 0.9)
    task.optimizer.step()  # torch warns about schedulers that are stepped first
    task.optimizer.zero_grad()
    for i, (x, y) in enumerate(task.batches()[:4]):
        (F.cross_entropy(task.model(x), y) / 2).backward()
        if i % 2 == 1:
            task.optimizer.step()
            task.optimizer.zero_grad()
        scheduler.step()


@fault("scheduler-never")
def scheduler_that_is_never_stepped(task: Task) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(task.optimizer, 5)
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
    assert scheduler.last_epoch == 0


@fault("eval-mode")
def trained_in_eval_mode(task: Task) -> None:
    task.model.eval()
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("eval-mode")
def a_part_in_eval_mode(task: Task) -> None:
    task.model[2].eval()  # type: ignore[index]
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("unused-parameters")
def detached_trunk(task: Task) -> None:
    trunk, head = task.model[:3], task.model[3]  # type: ignore[index]
    for x, y in task.batches():
        F.cross_entropy(head(trunk(x).detach()), y).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("parameters-without-optimizer")
def optimizer_of_the_head_alone(task: Task) -> None:
    optimizer = torch.optim.SGD(task.model[3].parameters(), 0.1)  # type: ignore[index]
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        optimizer.step()
        task.model.zero_grad()


@fault("not-connected")
def loss_without_graph(task: Task) -> None:
    for x, y in task.batches():
        with torch.no_grad():
            loss = F.cross_entropy(task.model(x), y)
        loss.requires_grad_().backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("not-connected")
def loss_made_of_a_number(task: Task) -> None:
    for x, y in task.batches():
        loss = F.cross_entropy(task.model(x), y)
        torch.tensor(loss.item(), requires_grad=True).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("broadcast")
def prediction_column_and_target_vector(task: Task) -> None:
    task.regression()
    for x, y in task.batches():
        ((task.model(x) - y) ** 2).mean().backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("non-finite")
def loss_that_is_nan_in_one_batch(task: Task) -> None:
    for i, (x, y) in enumerate(task.batches()):
        loss = F.cross_entropy(task.model(x), y)
        (loss * torch.nan if i == 2 else loss).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@fault("changed-between")
def clipping_of_accumulated_pieces(task: Task) -> None:
    for i, (x, y) in enumerate(task.batches()[:4]):
        (F.cross_entropy(task.model(x), y) / 2).backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 0.1)
        if i % 2 == 1:
            task.optimizer.step()
            task.optimizer.zero_grad()


@fault("clipped-scaled")
def clipping_before_unscaling(task: Task) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for x, y in task.batches():
        scaler.scale(F.cross_entropy(task.model(x), y)).backward()
        nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
        scaler.step(task.optimizer)
        scaler.update()
        task.optimizer.zero_grad()


# --- right loops ------------------------------------------------------------------------------------------------------

RIGHT: dict[str, Loop] = {}


def right(loop: Loop) -> Loop:
    RIGHT[loop.__name__] = loop
    return loop


@right
def plain(task: Task) -> None:
    for _ in range(2):
        for x, y in task.batches():
            task.optimizer.zero_grad()
            F.cross_entropy(task.model(x), y).backward()
            task.optimizer.step()


@right
def gradients_zeroed_in_place(task: Task) -> None:
    for x, y in task.batches():
        task.optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()


@right
def accumulated_with_a_ragged_end(task: Task) -> None:
    for _ in range(2):
        batches = task.batches()
        for k in range(0, len(batches), 2):
            window = batches[k : k + 2]
            for x, y in window:
                (F.cross_entropy(task.model(x), y, reduction="sum") / sum(len(y) for _, y in window)).backward()
            nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
            task.optimizer.step()
            task.optimizer.zero_grad()


@right
def weighted_by_tokens(task: Task) -> None:
    task.tokens()
    batches = task.batches(3)
    for k in range(0, len(batches), 3):
        window = batches[k : k + 3]
        tokens = sum(int((y != -100).sum()) for _, y in window)
        for x, y in window:
            (token_loss(task.model(x), y, "sum") / tokens).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def loss_scaling_with_an_overflow(task: Task) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-100)
    for i, (x, y) in enumerate(task.batches() * 2):
        scaler.scale(F.cross_entropy(task.model(x), y) * (1e6 if i == 0 else 1)).backward()
        scaler.unscale_(task.optimizer)
        nn.utils.clip_grad_norm_(task.model.parameters(), 0.5)
        scaler.step(task.optimizer)
        scaler.update()
        task.optimizer.zero_grad()


@right
def bf16_autocast(task: Task) -> None:
    for x, y in task.batches():
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(task.model(x), y)
        loss.backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def averaged_weights(task: Task) -> None:
    average = copy.deepcopy(task.model).requires_grad_(False)
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()
        with torch.no_grad():
            for p, q in zip(average.parameters(), task.model.parameters(), strict=True):
                p.lerp_(q, 0.1)
            average(x)


@right
def adversarial(task: Task) -> None:
    """Two optimizers; the discriminator gets two losses in each update, in two backward passes."""
    generator = nn.Sequential(nn.Linear(3, 6))
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    task.model = nn.ModuleList([generator, discriminator])
    of_generator = torch.optim.Adam(generator.parameters(), 1e-3)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), 1e-3)
    loss_fn = F.binary_cross_entropy_with_logits
    for x, _ in task.batches():
        of_discriminator.zero_grad()
        real = discriminator(x)
        loss_fn(real, torch.ones_like(real)).backward()
        made = generator(torch.randn(len(x), 3))
        judged = discriminator(made.detach())
        loss_fn(judged, torch.zeros_like(judged)).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        score = discriminator(made)
        loss_fn(score, torch.ones_like(score)).backward()
        of_generator.step()


@right
def gradient_penalty(task: Task) -> None:
    for x, y in task.batches():
        inputs = x.clone().requires_grad_()
        logits = task.model(inputs)
        (slope,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
        (F.cross_entropy(logits, y) + 0.1 * slope.square().sum(1).mean()).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def lbfgs(task: Task) -> None:
    optimizer = torch.optim.LBFGS(task.model.parameters(), 0.1, max_iter=3)
    for x, y in task.batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(task.model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


@right
def several_losses(task: Task) -> None:
    trunk, first = task.model[:3], task.model[3]  # type: ignore[index]
    second = nn.Linear(8, 3)
    task.model = nn.ModuleList([trunk, first, second])
    optimizer = torch.optim.SGD(task.model.parameters(), 0.1)
    for x, y in task.batches():
        hidden = trunk(x)
        loss = F.cross_entropy(first(hidden), y) + 0.3 * F.cross_entropy(second(hidden), y % 3)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@right
def criterion_with_class_weights(task: Task) -> None:
    criterion = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 0.5, 4.0]))
    for x, y in task.batches():
        criterion(task.model(x), y).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def functional_class_weights(task: Task) -> None:
    weight = torch.tensor([1.0, 2.0, 3.0, 0.5, 4.0])
    for x, y in task.batches(10):
        F.cross_entropy(task.model(x), y, weight).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def label_smoothing(task: Task) -> None:
    for x, y in task.batches():
        F.cross_entropy(task.model(x), y, label_smoothing=0.1).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def squared_error(task: Task) -> None:
    task.regression()
    for x, y in task.batches():
        F.mse_loss(task.model(x).squeeze(1), y).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def microbatches_with_shares(task: Task) -> None:
    """As Composer: a batch is cut into microbatches, each with its share of the batch in the loss."""
    for x, y in task.batches(10):
        for a, b in zip(x.split(4), y.split(4), strict=True):
            (F.cross_entropy(task.model(a), b) * len(a) / len(x)).backward()
        task.optimizer.step()
        task.optimizer.zero_grad()


@right
def a_step_of_samplewise(task: Task) -> None:
    import samplewise as sw

    step = sw.Step(task.model, task.optimizer, nn.CrossEntropyLoss(), samples=8, microbatch=3)
    for _ in step.over(task.batches(10)):
        pass


@right
def with_a_scheduler_and_validation(task: Task) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(task.optimizer, 1)
    for _ in range(2):
        task.model.train()
        for x, y in task.batches():
            F.cross_entropy(task.model(x), y).backward()
            task.optimizer.step()
            task.optimizer.zero_grad()
        scheduler.step()
        task.model.eval()
        with torch.no_grad():
            task.model(task.x)
