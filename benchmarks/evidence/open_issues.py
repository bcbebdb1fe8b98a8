"""Models of issues that users opened in Opacus, BackPACK and Laplace: run here, and compared with plain autograd.

    python benchmarks/evidence/open_issues.py [--write docs/evidence.md]

Each model is the smallest one that has what the issue is about, in our words. The norms of all per-sample gradients are
compared in float64 with one backward pass per sample; benchmarks/comparison.py has the words of the table and how each
library is called. Needs Opacus, BackPACK, Laplace and peft: benchmarks/evidence/requirements.txt.
"""

from __future__ import annotations

import warnings
from functools import partial

from record import Record, Table, Values, machine, parser, show

# isort: split
# Below, because record adds the directory of these modules to the path.
import torch
import torch.nn.functional as F
from comparison import COLUMNS, LENGTH, WIDTH, WORDS, Case, linear, sequences, vectors, words
from memory import peak_above_start
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.data import DataLoader, TensorDataset

import samplewise as sw

SEED = 0  # of Case.workload

# --- models of Opacus issues ------------------------------------------------------------------------------------------


class BroadcastPositions(nn.Module):
    """Position ids are computed in the model, without a batch dimension or with one of size 1."""

    def __init__(self, dimensions: int) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH), linear()
        self.dimensions = dimensions

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1]).view(*[1] * (self.dimensions - 1), -1)
        return self.head(torch.tanh(self.words(ids) + self.places(places)).mean(1))


class DiscardedCall(nn.Module):
    """DETR's decoder: the shared norm is called after each layer and at the end, where its last output is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm, self.head = nn.ModuleList([linear(), linear()]), nn.LayerNorm(WIDTH), linear()

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            outputs.append(self.norm(x))
        outputs[-1] = self.norm(x)
        return self.head(torch.stack(outputs).sum(0))


class LayerScale(nn.Module):
    """ConvNeXt's block: depthwise convolution, norm over channels, two linear layers, and a raw parameter as scale."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, WIDTH, 2, stride=2)
        self.depthwise = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), linear(WIDTH, 2 * WIDTH), linear(2 * WIDTH)
        self.scale, self.head = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), linear()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        x = x + (self.scale * self.down(F.gelu(self.up(inner)))).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class GraphConvolution(nn.Module):
    """torch_geometric's layout: the nodes of all graphs in one dimension, edges as pairs, a mean over each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = linear(), linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        count, nodes = x.shape[:2]
        ring = torch.arange(nodes)
        source, target = torch.cat([ring, ring]), torch.cat([ring, ring.roll(1)])  # loops, and each node's neighbor
        starts = nodes * torch.arange(count)[:, None]
        source, target = (source + starts).flatten(), (target + starts).flatten()
        h = x.flatten(0, 1)
        for layer in (self.first, self.second):
            h = torch.tanh(torch.zeros_like(h).index_add(0, target, layer(h)[source] / 2))
        graph = torch.arange(count).repeat_interleave(nodes)
        return self.head(h.new_zeros(count, WIDTH).index_add(0, graph, h / nodes))


def spectral(training: bool) -> nn.Module:
    return nn.Sequential(spectral_norm(linear()), nn.Tanh(), linear()).train(training)


class AdaptedGPT2(nn.Module):
    """GPT-2 with adapters of peft on c_attn; only the adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import GPT2Config, GPT2LMHeadModel

        sizes = {"vocab_size": WORDS, "n_positions": LENGTH, "n_embd": 8, "n_layer": 1, "n_head": 2}
        model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
        adapters = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
        self.model = get_peft_model(model, adapters)

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits[:, -1, :WIDTH]


# --- models of BackPACK issues ----------------------------------------------------------------------------------------


class Siamese(nn.Module):
    """One layer applied to two halves of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.head = linear(WIDTH // 2), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.shared(x[:, : WIDTH // 2]) + self.shared(x[:, WIDTH // 2 :])))


class Decoder(nn.Module):
    """LSTM whose outputs at all times go through a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0]).mean(1)


def autoencoder() -> nn.Module:
    """Convolution and transposed convolution, with BatchNorm in eval mode."""
    up = nn.ConvTranspose2d(4, 2, 3)
    layers = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), up, nn.Flatten(), linear(2 * 6 * 6)
    return nn.Sequential(*layers).eval()


def images() -> Tensor:
    return torch.randn(5, 2, 6, 6)


OPACUS, BACKPACK = "https://github.com/meta-pytorch/opacus/issues/", "https://github.com/f-dangel/backpack/issues/"
ISSUES: list[tuple[str, str, int, Case]] = [
    ("Opacus", OPACUS, 841, Case("GPT-2: position ids of shape (1, T)", partial(BroadcastPositions, 2), words)),
    ("Opacus", OPACUS, 505, Case("a transformer: position ids of shape (T,)", partial(BroadcastPositions, 1), words)),
    ("Opacus", OPACUS, 820, Case("GPT-2 with LoRA of peft", AdaptedGPT2, words)),
    ("Opacus", OPACUS, 578, Case("DETR: a shared LayerNorm, one of whose outputs is dropped", DiscardedCall, vectors)),
    ("Opacus", OPACUS, 462, Case("ConvNeXt: a raw parameter as layer scale", LayerScale, images)),
    ("Opacus", OPACUS, 646, Case("spectral norm, training mode", partial(spectral, training=True), vectors)),
    (
        "Opacus",
        OPACUS,
        588,
        Case("graph convolution, nodes of all graphs in one dimension", GraphConvolution, sequences),
    ),
    ("BackPACK", BACKPACK, 248, Case("a layer applied to two halves of the input", Siamese, vectors)),
    ("BackPACK", BACKPACK, 270, Case("LSTM, then a linear layer at all times", Decoder, sequences)),
    (
        "BackPACK",
        BACKPACK,
        219,
        Case("convolution and transposed convolution, BatchNorm in eval mode", autoencoder, images),
    ),
]
LIBRARIES = ("samplewise", "Opacus hooks", "Opacus ghost", "BackPACK")


def verdicts(case: Case) -> Values:
    found = {name: COLUMNS[name](case) for name in LIBRARIES}
    return {name: {"word": verdict.word, "message": verdict.message} for name, verdict in found.items()}


# --- Laplace #281 -----------------------------------------------------------------------------------------------------

SIDE, IMAGES, DRAWS = 12, 4, 100


def diagonal() -> Values:
    """Diagonal of the generalized Gauss-Newton matrix of a regression from images to images, by Laplace and sw.fisher.

    The issue: with one output per pixel, memory was 7 TB for a diagonal of 47 MB. With unit noise on the targets, this
    diagonal is the mean of squared gradients if the targets are drawn from the model: sw.fisher needs one pass a draw.
    """
    from laplace import Laplace

    torch.manual_seed(SEED)
    layers = nn.Conv2d(1, 12, 3, padding=1), nn.Tanh(), nn.Conv2d(12, 12, 3, padding=1), nn.Tanh()
    model = nn.Sequential(*layers, nn.Conv2d(12, 1, 3, padding=1), nn.Flatten())
    batch = [torch.randn(IMAGES, 1, SIDE, SIDE), torch.randn(IMAGES, SIDE * SIDE)]
    loader = DataLoader(TensorDataset(*batch), batch_size=IMAGES)
    found: dict[str, Tensor] = {}

    def by_laplace() -> None:
        fitted = Laplace(model, "regression", subset_of_weights="all", hessian_structure="diag")
        fitted.fit(loader)
        found["laplace"] = fitted.H

    def by_samplewise() -> None:
        draws = [*loader] * DRAWS
        found["samplewise"] = IMAGES * torch.cat([p.flatten() for p in sw.fisher(model, drawn_losses, draws).values()])

    peaks = {"laplace": peak_above_start(by_laplace), "samplewise": peak_above_start(by_samplewise)}
    outputs = model(batch[0]).flatten()
    wanted = torch.zeros_like(found["laplace"])
    for output in outputs:  # one backward pass for each output of each sample
        gradient = torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        wanted += torch.cat([g.flatten() for g in gradient]).square()
    return {
        name: {"bytes": peaks[name], "error": ((found[name] - wanted).abs().sum() / wanted.sum()).item()}
        for name in peaks
    } | {"jacobian": outputs.numel() * len(wanted) * wanted.element_size()}


def drawn_losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Losses for targets that are drawn from the model's own distribution, with unit variance."""
    outputs = model(batch[0])
    targets = (outputs + torch.randn_like(outputs)).detach()
    return (outputs - targets).square().sum(1) / 2


def main() -> None:
    options = parser(__doc__, "open_issues").parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")  # of other libraries; a warning is not an error here
    record = Record(options.results)
    rows = [["issue", "model", *LIBRARIES]]
    messages = []
    for library, address, number, case in ISSUES:
        values = record.run(f"{library} #{number}", partial(verdicts, case))
        rows.append(
            [
                f"[{library} #{number}]({address}{number})",
                case.name,
                *(values[name]["word"].replace("*", r"\*") for name in LIBRARIES),
            ]
        )
        messages += [f"{library} #{number}, {name}: {value['message']}" for name, value in values.items()]
    seconds = sum(record.seconds(f"{library} #{number}") for library, _, number, _ in ISSUES)
    caption = f"Seed {SEED}; float64; CPU time of all {seconds:.0f} s; {machine()}."
    show(Table("evidence-issues", "Issues of others", rows, caption, tuple(messages)), options.write)
    values = record.run("Laplace #281", diagonal)
    rows = [["", "peak memory", "error, relative to the sum of the diagonal"]]
    for name, title in (
        ("laplace", 'Laplace, `hessian_structure="diag"`'),
        ("samplewise", f"`sw.fisher`, {DRAWS} draws"),
    ):
        rows.append([title, f"{values[name]['bytes'] / 1e6:.0f} MB", f"{values[name]['error']:.1g}"])
    caption = (
        f"{IMAGES} images of {SIDE} × {SIDE} pixels; the Jacobian has {values['jacobian'] / 1e6:.0f} MB. Seed {SEED}; "
        f"float64; CPU time {record.seconds('Laplace #281'):.0f} s; {machine()}."
    )
    show(
        Table("evidence-laplace", "Laplace #281: a diagonal for a model with an output per pixel", rows, caption),
        options.write,
    )


if __name__ == "__main__":
    main()
