"""Weights of samples and tokens in the updates of other libraries' trainers, measured with sw.audit.

python benchmarks/audit_trainers.py [--only WORD] [--write docs/audit.md]      # or `make audit-trainers`
python benchmarks/audit_trainers.py NAME --batch 4 --accumulate 2

Each trainer uses the same 20 samples for one epoch, with batch size × gradient accumulation of 8 × 1, 4 × 2 and 1 × 8:
updates of 8, 8 and 4 samples. Texts have 3 to 12 tokens and are padded. In an update of a language model all tokens
should have equal weights, in one of a classifier all samples. Models are tiny and random; nothing is downloaded.

The first form runs each trainer in a process of its own, in the environment that has its version, and keeps results in
build/audit_trainers.jsonl: a second call runs only what is missing or has failed. The second form runs one trainer in
the current environment, and prints its audit and a line of JSON.
"""

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tables import Table, write
from torch import Tensor, nn
from torch.utils.data import DataLoader

import samplewise as sw

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build/audit_trainers.jsonl"
TIME_LIMIT = 300  # seconds per process
CURRENT = (".venv-audit",)
BOTH = (".venv-audit", ".venv-transformers-4.57.6")
SIZES = ((8, 1), (4, 2), (1, 8))  # batch size, gradient accumulation
SAMPLES, VOCABULARY, LONGEST, CLASSES = 20, 32, 12, 3
Key = tuple[str, str, int, int]  # name, environment, batch size, gradient accumulation


@dataclass(frozen=True)
class Trainer:
    """One row of the table, or one per environment. `run(batch, accumulation)` returns the audit of one epoch."""

    name: str
    title: str
    library: str  # distribution, for the version; "" for a script
    threads: str  # issues and pull requests, as owner/repository#number
    environments: tuple[str, ...]
    run: Callable[[int, int], Any]


TRAINERS: dict[str, Trainer] = {}


def trainer(
    name: str, title: str, library: str = "", threads: str = "", environments: tuple[str, ...] = CURRENT, **options: Any
) -> Callable[..., Any]:
    """Decorator that registers a trainer. `options` are keyword arguments of the function."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        TRAINERS[name] = Trainer(name, title, library, threads, environments, partial(function, **options))
        return function

    return register


# --- data and models -------------------------------------------------------------------------------------------------


def texts() -> list[list[int]]:
    """Token ids of the samples, without padding (0) and special tokens (1, 2)."""
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, LONGEST + 1, (SAMPLES,), generator=random).tolist()
    return [torch.randint(3, VOCABULARY, (length,), generator=random).tolist() for length in lengths]


def padded(rows: Iterable[list[int]], value: int = 0) -> Tensor:
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def collate(per: str, samples: Iterable[int]) -> tuple[Tensor, Tensor]:
    """Inputs (rows, tokens), and labels: the next tokens, or one class per row."""
    rows = [(texts()[i], i % CLASSES) for i in samples]
    if per == "sample":
        return padded(text for text, _ in rows), torch.tensor([label for _, label in rows])
    return padded(text[:-1] for text, _ in rows), padded((text[1:] for text, _ in rows), value=-100)


def loader(per: str, batch: int) -> DataLoader[Any]:
    return DataLoader(range(SAMPLES), batch_size=batch, collate_fn=partial(collate, per))


def windows(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of `size` batches; the last one may be shorter."""
    iterator = iter(batches)
    while window := list(islice(iterator, size)):
        yield window


class Net(nn.Module):
    """GRU over tokens. Returns logits (rows, tokens, vocabulary) per token, or (rows, classes) per sample."""

    def __init__(self, per: str):
        super().__init__()
        torch.manual_seed(0)
        self.per = per
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.recurrent = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY if per == "token" else CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        features, _ = self.recurrent(self.embedding(ids))
        return self.head(features if self.per == "token" else features.mean(1))


def loss_fn(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Cross entropy as most scripts compute it: the mean over the labels of a batch."""
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def train_by_tokens(
    model: Any, optimizer: Any, batches: Any, accumulation: int, backward: Any, factor: int = 1
) -> None:
    """Correct loop: losses are summed, and divided by the tokens of all batches of an update."""
    for window in windows(batches, accumulation):
        count = sum((y != -100).sum() for _, y in window)
        for x, y in window:
            backward(loss_fn(model(x), y, reduction="sum") * factor / count)
        optimizer.step()
        optimizer.zero_grad()


# --- Hugging Face ----------------------------------------------------------------------------------------------------


def arguments(batch: int, accumulation: int, **options: Any) -> dict[str, Any]:
    """Keyword arguments of TrainingArguments, and of its subclasses in TRL."""
    return {
        "output_dir": tempfile.mkdtemp(), "per_device_train_batch_size": batch, "use_cpu": True, "bf16": False,
        "gradient_accumulation_steps": accumulation, "num_train_epochs": 1, "learning_rate": 0.1, "optim": "sgd",
        "report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, **options,
    }  # fmt: skip


def huggingface_model(kind: str) -> nn.Module:
    """Tiny model with random weights: "gpt2", "classifier" (GPT-2), "llama" or "t5"."""
    import transformers as hf

    torch.manual_seed(0)
    ids: dict[str, Any] = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "t5":
        t5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
        return hf.T5ForConditionalGeneration(hf.T5Config(**ids, **t5, dropout_rate=0.0))
    if kind == "llama":
        llama = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        return hf.LlamaForCausalLM(hf.LlamaConfig(**ids, **llama))
    gpt2 = {"n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "num_labels": CLASSES}
    gpt2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    head = hf.GPT2LMHeadModel if kind == "gpt2" else hf.GPT2ForSequenceClassification
    return head(hf.GPT2Config(**ids, **gpt2))


def padded_rows(kind: str, samples: list[int]) -> dict[str, Tensor]:
    """Batch of a Hugging Face model, whose labels are its inputs or classes."""
    ids = padded(texts()[i] for i in samples)
    labels = torch.tensor([i % CLASSES for i in samples]) if kind == "classifier" else ids.where(ids != 0, -100)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}
    # A trainer with `compute_loss_func` does not pass the labels to the model, which would shift them.
    return {**batch, "decoder_input_ids": F.pad(ids[:, :-1], (1, 0))} if kind == "t5" else batch


def mean_of_window(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """Loss for `compute_loss_func`: divided by the number of labels in all batches of an update."""
    return loss_fn(outputs["logits"], labels, reduction="sum") / num_items_in_batch


INFLATED = "huggingface/transformers#47688"  # heads that drop num_items_in_batch
UNEQUAL = f"{INFLATED} huggingface/transformers#37766"  # heads that do not accept it
SHIFTED = "huggingface/transformers#46204"  # labels counted before the shift
FIX = "`compute_loss_func`"


@trainer("hf-t5-fixed", f"Seq2SeqTrainer, T5, {FIX}", "transformers", UNEQUAL, BOTH, kind="t5", fixed=True)
@trainer("hf-t5", "Seq2SeqTrainer, T5", "transformers", UNEQUAL, BOTH, kind="t5")
@trainer("hf-gpt2", "Trainer, GPT-2", "transformers", SHIFTED, BOTH, kind="gpt2")
@trainer("hf-llama", "Trainer, Llama", "transformers", SHIFTED, BOTH, kind="llama")
@trainer("hf-classifier-fixed", f"Trainer, classifier, {FIX}", "transformers", INFLATED, kind="classifier", fixed=True)
@trainer("hf-classifier", "Trainer, classifier (GPT-2)", "transformers", INFLATED, BOTH, kind="classifier")
def huggingface(batch: int, accumulation: int, kind: str, fixed: bool = False) -> Any:
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

    model = huggingface_model(kind)
    args = Seq2SeqTrainingArguments(**arguments(batch, accumulation))
    options = {"compute_loss_func": mean_of_window} if fixed else {}
    data = list(range(SAMPLES))
    made = Seq2SeqTrainer(model, args, train_dataset=data, data_collator=partial(padded_rows, kind), **options)
    with sw.audit(model, per="sample" if kind == "classifier" else "token") as audit:
        made.train()
    return audit


def words() -> list[str]:
    return [" ".join(f"w{i}" for i in text) for text in texts()]


def trl_trainer(name: str, model: nn.Module, args: dict[str, Any], columns: dict[str, Any], **options: Any) -> Any:
    """Trainer of TRL, with a tokenizer that turns the words back into token ids."""
    import trl
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    vocabulary = [*special.values(), *(f"w{i}" for i in range(3, VOCABULARY))]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="<eos>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, **special)
    data = Dataset.from_dict(columns)
    config = getattr(trl, f"{name}Config")(**args)
    return getattr(trl, f"{name}Trainer")(model, args=config, train_dataset=data, processing_class=tokenizer, **options)


@trainer("trl-sft-gpt2", "SFTTrainer, GPT-2", "trl", SHIFTED, kind="gpt2")
@trainer("trl-sft", "SFTTrainer, Llama", "trl", SHIFTED, kind="llama")
def trl_sft(batch: int, accumulation: int, kind: str) -> Any:
    made = trl_trainer("SFT", huggingface_model(kind), arguments(batch, accumulation), {"text": words()})
    with sw.audit(made.model, per="token") as audit:
        made.train()
    return audit


@trainer("trl-dpo", "DPOTrainer", "trl", "huggingface/trl#5710")
def trl_dpo(batch: int, accumulation: int) -> Any:
    columns = {"prompt": ["w3 w4 "] * SAMPLES, "chosen": words(), "rejected": words()[::-1]}
    model, reference_model = (huggingface_model("gpt2") for _ in range(2))
    made = trl_trainer("DPO", model, arguments(batch, accumulation), columns, ref_model=reference_model)

    def losses(log_probs: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Loss of its pair for each row; the chosen rows are the first half."""
        with torch.no_grad():
            reference = made.ref_model(**inputs).log_probs
        chosen, rejected = (log_probs - reference).sum(-1).chunk(2)
        return -F.logsigmoid(made.args.beta * (chosen - rejected)).repeat(2)

    with sw.audit(made.model, per="sample", losses=losses, labels=lambda args, kwargs: kwargs) as audit:
        made.train()
    return audit


ACCUMULATED = "huggingface/trl#3021"


def rewards(completions: list[str], **_: Any) -> list[float]:
    """Different rewards, so that no advantage is zero."""
    return [float(i) for i in range(len(completions))]


@trainer("trl-grpo-dapo", "GRPOTrainer, `dapo` (default)", "trl", ACCUMULATED, loss_type="dapo", per="token")
@trainer("trl-grpo-bnpo", "GRPOTrainer, `bnpo`", "trl", ACCUMULATED, loss_type="bnpo", per="token")
@trainer("trl-grpo", "GRPOTrainer, `grpo`", "trl", ACCUMULATED, loss_type="grpo", per="sample")
def trl_grpo(batch: int, accumulation: int, loss_type: str, per: str) -> Any:
    sizes = {"num_generations": 2, "max_completion_length": LONGEST, "loss_type": loss_type}
    args = arguments(batch, accumulation, **sizes)
    made = trl_trainer("GRPO", huggingface_model("gpt2"), args, {"prompt": words()}, reward_funcs=rewards)
    current: dict[str, Tensor] = {}
    compute_loss = made._compute_loss
    made._compute_loss = lambda model, inputs: current.update(inputs) or compute_loss(model, inputs)

    def losses(log_probs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        """Policy gradient losses of the generated tokens, or their mean per sample."""
        mask = inputs["completion_mask"]
        mask = F.pad(mask, (log_probs.shape[1] - mask.shape[1], 0))  # zeros for the prompts
        elements = -inputs["advantages"][:, None] * log_probs * mask
        return elements if per == "token" else elements.sum(1) / mask.sum(1)

    with sw.audit(made.model, per=per, losses=losses, labels=lambda args, kwargs: dict(current)) as audit:
        made.train()
    return audit


# --- Lightning and Accelerate ----------------------------------------------------------------------------------------


@trainer("lightning-manual", "Trainer, manual optimization", "lightning", per="token", manual=True)
@trainer("lightning-lm", "Trainer, language model", "lightning", "Lightning-AI/pytorch-lightning#19987", per="token")
@trainer("lightning", "Trainer, classifier", "lightning", "Lightning-AI/pytorch-lightning#19987", per="sample")
def lightning(batch: int, accumulation: int, per: str, manual: bool = False) -> Any:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(per)
            self.automatic_optimization = not manual

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

        def training_step(self, arrays: tuple[Tensor, Tensor], index: int) -> Tensor:
            loss = loss_fn(self.net(arrays[0]), arrays[1])
            if manual:  # as in its documentation
                self.manual_backward(loss / accumulation)
                if (index + 1) % accumulation == 0:
                    self.optimizers().step()
                    self.optimizers().zero_grad()
            return loss

    module = Module()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    steps = {} if manual else {"accumulate_grad_batches": accumulation}
    made = L.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tempfile.mkdtemp(), **quiet, **steps)
    with sw.audit(module.net, per=per) as audit:
        made.fit(module, loader(per, batch))
    return audit


@trainer("fabric-fixed", "Fabric, divided by the tokens of an update", "lightning", fixed=True)
@trainer("fabric", "Fabric, as in its documentation", "lightning")
def fabric(batch: int, accumulation: int, fixed: bool = False) -> Any:
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=1)
    net = Net("token")
    model, optimizer = made.setup(net, sgd(net))
    batches = made.setup_dataloaders(loader("token", batch))
    with sw.audit(net, per="token") as audit:
        if fixed:
            train_by_tokens(model, optimizer, batches, accumulation, made.backward)
            return audit
        for index, (x, y) in enumerate(batches):
            accumulating = index % accumulation != 0
            with made.no_backward_sync(model, enabled=accumulating):
                made.backward(loss_fn(model(x), y))
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()
    return audit


@trainer("accelerate-fixed", "Accelerate, divided by the tokens of an update", "accelerate", per="token", fixed=True)
@trainer("accelerate-lm", "Accelerate, language model", "accelerate", per="token")
@trainer("accelerate", "Accelerate, classifier", "accelerate", per="sample")
def accelerate(batch: int, accumulation: int, per: str, fixed: bool = False) -> Any:
    from accelerate import Accelerator

    made = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    net = Net(per)
    model, optimizer, batches = made.prepare(net, sgd(net), loader(per, batch))
    with sw.audit(net, per=per) as audit:
        if fixed:  # backward() divides by the accumulation
            train_by_tokens(model, optimizer, batches, accumulation, made.backward, factor=accumulation)
            return audit
        for x, y in batches:
            with made.accumulate(model):
                made.backward(loss_fn(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return audit


# --- other frameworks ------------------------------------------------------------------------------------------------


@trainer("keras", "`fit`, classifier", "keras")
def keras(batch: int, accumulation: int) -> Any:
    os.environ["KERAS_BACKEND"] = "torch"
    import keras

    keras.utils.set_random_seed(0)
    features = [keras.layers.Embedding(VOCABULARY, 16), keras.layers.GlobalAveragePooling1D()]
    model = keras.Sequential([keras.Input((None,), dtype="int32"), *features, keras.layers.Dense(CLASSES)])
    steps = accumulation if accumulation > 1 else None
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = collate("sample", range(SAMPLES))
    with sw.audit(model, per="sample") as audit:
        model.fit(x.numpy(), y.numpy(), batch_size=batch, epochs=1, verbose=0)
    return audit


@trainer("ignite", "`create_supervised_trainer`, classifier", "pytorch-ignite")
def ignite(batch: int, accumulation: int) -> Any:
    from ignite.engine import create_supervised_trainer

    net = Net("sample")
    made = create_supervised_trainer(net, sgd(net), loss_fn, gradient_accumulation_steps=accumulation)
    with sw.audit(net, per="sample") as audit:
        made.run(loader("sample", batch), max_epochs=1)
    return audit


@trainer("fastai", "`GradientAccumulation`, classifier", "fastai")
def fastai(batch: int, accumulation: int) -> Any:
    from fastai.basics import SGD, DataLoaders, Learner
    from fastai.callback.training import GradientAccumulation
    from fastai.data.load import DataLoader as FastLoader

    data = FastLoader(list(range(SAMPLES)), bs=batch, create_batch=partial(collate, "sample"), num_workers=0)
    net = Net("sample")
    callback = GradientAccumulation(batch * accumulation)
    learn = Learner(DataLoaders(data, data), net, loss_func=loss_fn, opt_func=SGD, cbs=callback)
    with sw.audit(net, per="sample") as audit, learn.no_bar(), learn.no_logging():
        learn.fit(1, 0.1)
    return audit


@trainer("skorch", "`NeuralNet`, `train_step` as in its documentation, classifier", "skorch", "skorch-dev/skorch#506")
def skorch(batch: int, accumulation: int) -> Any:
    from skorch import NeuralNet

    class Accumulating(NeuralNet):
        def get_loss(self, *args: Any, **options: Any) -> Tensor:
            return super().get_loss(*args, **options) / accumulation

        def train_step(self, batch: Any, **options: Any) -> Any:
            result = self.train_step_single(batch, **options)
            if len(self.history[-1, "batches"]) % accumulation == 0:
                self.optimizer_.step()
                self.optimizer_.zero_grad()
            return result

    x, y = collate("sample", range(SAMPLES))
    options = {"module__per": "sample", "train_split": None, "batch_size": batch, "max_epochs": 1, "verbose": 0}
    made = Accumulating(Net, criterion=nn.CrossEntropyLoss, **options).initialize()
    with sw.audit(made.module_, per="sample") as audit:
        made.partial_fit(x, y)
    return audit


class Absent(types.ModuleType):
    """Stand-in for a package that Composer imports, but that is not used here. Its names are empty classes."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


BY_TOKENS = "mosaicml/composer#3273"


@trainer("composer-fixed", "Trainer, weighted by tokens", "mosaicml", BY_TOKENS, per="token", fixed=True)
@trainer("composer-lm", "Trainer, language model", "mosaicml", BY_TOKENS, per="token")
@trainer("composer", "Trainer, classifier", "mosaicml", per="sample")
def composer(batch: int, accumulation: int, per: str, fixed: bool = False) -> Any:
    parts = "transforms transforms.functional datasets models models.resnet ops utils".split()
    for name in ["mcli", "torchvision", *(f"torchvision.{part}" for part in parts)]:
        sys.modules[name] = Absent(name)
        sys.modules[name].__spec__ = ModuleSpec(name, None)
    import composer

    class Model(composer.ComposerModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(per)

        def forward(self, arrays: tuple[Tensor, Tensor]) -> Tensor:
            return self.net(arrays[0])

        def loss(self, outputs: Tensor, arrays: tuple[Tensor, Tensor]) -> Tensor:
            return loss_fn(outputs, arrays[1])

    model = Model()
    whole = loader(per, batch * accumulation)
    data = composer.DataSpec(whole, get_num_tokens_in_batch=lambda arrays: int((arrays[1] != -100).sum()))
    made = composer.Trainer(
        model=model, train_dataloader=data, max_duration="1ep", optimizers=sgd(model), device="cpu",
        device_train_microbatch_size=batch, accumulate_train_batch_on_tokens=fixed, progress_bar=False,
    )  # fmt: skip
    with sw.audit(model.net, per=per) as audit:
        made.fit()
    return audit


# --- scripts ---------------------------------------------------------------------------------------------------------


@trainer("script-torchtune", "script like torchtune: sums of losses, gradients divided by the tokens", style="sums")
@trainer("script-rest", "script: losses divided by n, always", "", "jingyaogong/minimind#749", style="rest")
@trainer("script", "script: losses divided by n, update after every n batches", style="constant")
def script(batch: int, accumulation: int, style: str) -> Any:
    net = Net("token")
    optimizer = sgd(net)
    with sw.audit(net, per="token") as audit:
        for window in windows(loader("token", batch), accumulation):
            for x, y in window:
                loss = loss_fn(net(x), y)
                (loss * (y != -100).sum() if style == "sums" else loss / accumulation).backward()
            if style == "sums":
                for parameter in net.parameters():
                    parameter.grad /= sum((y != -100).sum() for _, y in window)
            if style != "constant" or len(window) == accumulation:
                optimizer.step()
                optimizer.zero_grad()
    return audit


@trainer("script-nanogpt", "script like nanoGPT: blocks of equal length, losses divided by n")
def script_nanogpt(batch: int, accumulation: int) -> Any:
    stream = torch.tensor([token for text in texts() for token in text])
    net = Net("token")
    optimizer = sgd(net)
    with sw.audit(net, per="token") as audit:
        for _ in range(3):
            for _ in range(accumulation):
                starts = torch.randint(len(stream) - LONGEST, (batch, 1))
                x, y = (stream[starts + torch.arange(LONGEST) + shift] for shift in (0, 1))
                (loss_fn(net(x), y) / accumulation).backward()
            optimizer.step()
            optimizer.zero_grad()
    return audit


# --- running and table -----------------------------------------------------------------------------------------------


def measure(row: Trainer, batch: int, accumulation: int) -> None:
    """Run a trainer; print its audit and a line of JSON."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(sys.stderr):
        audit = row.run(batch, accumulation)
    codes = [finding.code for finding in audit.findings]
    library = f"{row.library} {version(row.library)}" if row.library else "–"
    line = {"library": library, "ok": audit.ok, "verdict": audit.verdict, "codes": codes}
    print(audit)
    print(json.dumps({**line, "sums": list(audit.sums), "deviation": float(audit.deviation)}))


def run(job: Key) -> dict[str, Any]:
    """Result of a trainer in a process of its own."""
    name, environment, batch, accumulation = job
    python = ROOT / environment / ("Scripts" if os.name == "nt" else "bin") / "python"
    command = [str(python), __file__, name, "--batch", str(batch), "--accumulate", str(accumulation)]
    try:
        finished = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    if finished.returncode:
        return {"error": (finished.stderr.strip().splitlines() or [""])[-1]}
    return json.loads(finished.stdout.splitlines()[-1])


def run_all(rows: Iterable[Trainer]) -> dict[Key, dict[str, Any]]:
    """Results of all trainers; those that are missing are computed and appended to the file."""
    RESULTS.parent.mkdir(exist_ok=True)
    lines = map(json.loads, RESULTS.read_text().splitlines() if RESULTS.exists() else [])
    results = {tuple(line["job"]): line for line in lines if line.get("ok") or line.get("codes")}
    jobs = [(row.name, environment, *size) for row in rows for environment in row.environments for size in SIZES]
    for number, job in enumerate(jobs, 1):
        if job not in results:
            print(f"{number} of {len(jobs)}: {job[0]}, {job[2]} × {job[3]}, {job[1]}", flush=True)
            results[job] = {"job": job, **run(job)}
            print("   ", results[job].get("verdict") or results[job]["error"], flush=True)
            with RESULTS.open("a") as file:
                file.write(json.dumps(results[job]) + "\n")
    return results


def cell(result: dict[str, Any]) -> str:
    """Range of the sums of weights, and the largest deviation of a weight."""
    if "error" in result:
        return "does not run"
    if not result["sums"]:
        return "no update"
    low, high = (f"{bound(result['sums']):.2f}" for bound in (min, max))
    weights = "?" if low == "nan" else low if low == high else f"{low} to {high}"
    return weights if isnan(result["deviation"]) else f"{weights}, ±{100 * result['deviation']:.0f} %"


def links(threads: str) -> str:
    """Markdown links of threads that are given as owner/repository#number."""
    parts = [(*thread.split("#"), thread.split("/")[1]) for thread in threads.split()]
    return ", ".join(f"[{text}](https://github.com/{place}/issues/{number})" for place, number, text in parts)


def table(rows: Iterable[Trainer], results: dict[Key, dict[str, Any]]) -> Table:
    body = []
    for row in rows:
        for environment in row.environments:
            of_sizes = [results[row.name, environment, *size] for size in SIZES]
            codes = dict.fromkeys(code for result in of_sizes for code in result.get("codes", ()))
            failures = [r.get("error") or r["verdict"] for r in of_sizes if not (r.get("ok") or r.get("codes"))]
            library = next((result["library"] for result in of_sizes if "library" in result), row.library)
            verdict = failures[0][:60] if failures else ", ".join(codes) or "ok"
            body.append([library, row.title, *map(cell, of_sizes), verdict, links(row.threads)])
    sizes = [f"{batch} × {accumulation}" for batch, accumulation in SIZES]
    caption = (
        "In each cell: the sum of the weights of an update, from the lowest to the highest of 3 updates (5 of GRPO), "
        f"and the largest relative deviation of a weight; ?: cannot be seen. torch {torch.__version__}, CPU, 1 process."
    )
    return Table("trainers", "Trainers", [["library", "trainer", *sizes, "findings", "thread"], *body], caption)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=TRAINERS, metavar="NAME", help="default: all")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--only", default="", metavar="WORD", help="run the trainers whose name contains it")
    parser.add_argument("--write", type=Path, metavar="DOCUMENT", help="document whose table is replaced")
    chosen = parser.parse_args()
    if chosen.only and chosen.write:
        parser.error("--write must be used without --only: the document has the table of all trainers.")
    if chosen.name:
        measure(TRAINERS[chosen.name], chosen.batch, chosen.accumulate)
        return
    rows = [row for name, row in TRAINERS.items() if chosen.only in name]
    made = table(rows, run_all(rows))
    print(made)
    if chosen.write:
        write(made, chosen.write)


if __name__ == "__main__":
    main()
