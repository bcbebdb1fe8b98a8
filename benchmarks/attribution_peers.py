"""Influence scores beside those of kronfluence and captum: differences, and seconds in the same run.

`of_kronfluence`, `of_dattri` and `of_bergson` are also the rows of other libraries in the tables of attribution.py.

    pip install kronfluence==1.0.1 captum==0.9.0             # into an environment of their own, with torch 2.13.0
    python benchmarks/attribution_peers.py                   # both
    python benchmarks/attribution_peers.py kronfluence --train 5000 --queries 500 --rounds 3

An MLP 784-128-64-10 on Fashion-MNIST (see examples/fashion_mnist.py), trained for a few epochs, one thread. Exits with
an error if identity scores differ from kronfluence's by more than 1e-5 of the largest, EK-FAC scores correlate with
kronfluence's by less than 0.999, TracIn differs from captum's TracInCP by more than 1e-6 of the largest, or fit and
score together take more than half of kronfluence's time.
"""

import argparse
import copy
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from attribution_tasks import LENGTH, LETTERS, TASKS, LanguageModel, letters
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader, Subset, default_collate

import samplewise as sw
from samplewise.attribution.projected_features import outputs_and_weights

BATCH = 500


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peers", nargs="*", default=["kronfluence", "captum"])
    parser.add_argument("--train", type=int, default=5000)
    parser.add_argument("--queries", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = replace(TASKS["mlp"], samples=options.train, queries=options.queries)
    train, queries = task.data()
    model, checkpoints = trained(task, train)
    failures = []
    if "kronfluence" in options.peers:
        failures += beside_kronfluence(model, train, queries, options.rounds)
    if "captum" in options.peers:
        few = Subset(train, range(min(1000, len(train)))), Subset(queries, range(min(100, len(queries))))  # it is slow
        failures += beside_captum(model, checkpoints, *few)
    if failures:
        sys.exit("\n".join(failures))


def trained(task, train, epochs=5):
    """The model after training, and (state_dict, lr) after each epoch."""
    torch.manual_seed(0)
    step, checkpoints = task.make_step(), []
    for _ in range(epochs):
        step.run(DataLoader(train, task.batch_size, shuffle=True))
        checkpoints.append((copy.deepcopy(step.model.state_dict()), task.lr))
    return step.model, checkpoints


def losses(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def cross_entropy(logits, labels):
    """Losses (b,), means over the tokens of a sample if there are any."""
    return F.cross_entropy(logits.movedim(-1, 1), labels, reduction="none").view(len(labels), -1).mean(1)


# --- kronfluence ---------------------------------------------------------------------------------------------------


def beside_kronfluence(model, train, queries, rounds):
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(rounds):  # alternating, because the machine is shared
            theirs.append(of_kronfluence(model, train, queries, "ekfac", directory, empirical=True))
            ours.append(of_samplewise(model, train, queries))
        identity = of_kronfluence(model, train, queries, "identity", directory, empirical=True)[0]
    products = sw.influence(model, losses, DataLoader(train, BATCH), DataLoader(queries, BATCH))
    difference = relative_difference(products, identity)
    correlation = torch.corrcoef(torch.stack([ours[0][0].flatten(), theirs[0][0].flatten()]))[0, 1].item()
    fit, score, their_fit, their_score = (min(run[i] for run in runs) for runs in (ours, theirs) for i in (1, 2))
    ratio = min((a[1] + a[2]) / (b[1] + b[2]) for a, b in zip(ours, theirs, strict=True))
    print(f"identity, largest difference from kronfluence / largest score   {difference:.1e}")
    print(f"EK-FAC (empirical Fisher), correlation with kronfluence         {correlation:.6f}")
    print(f"EK-FAC seconds, fit and score: samplewise                       {fit:.1f} + {score:.1f}")
    print(f"                               kronfluence                      {their_fit:.1f} + {their_score:.1f}")
    print(f"                               ratio                            {ratio:.2f}")
    return [
        *(["identity differs from kronfluence's"] if difference > 1e-5 else []),
        *(["EK-FAC differs from kronfluence's"] if correlation < 0.999 else []),
        *(["EK-FAC takes more than half of kronfluence's time"] if ratio > 0.5 else []),
    ]


def of_samplewise(model, train, queries):
    """EK-FAC scores (queries, training samples), seconds of the fit, seconds of the scores."""
    start = time.perf_counter()
    curvature = sw.ekfac(model, losses, DataLoader(train, BATCH), labels="data")
    fitted = time.perf_counter()
    scores = sw.influence(model, losses, DataLoader(train, BATCH), DataLoader(queries, BATCH), curvature=curvature)
    return scores, fitted - start, time.perf_counter() - fitted


def of_kronfluence(model, train, queries, strategy, directory, empirical=False):
    """Scores (queries, training samples), seconds of the fit, seconds of the scores. Damping is that of samplewise."""
    from kronfluence.analyzer import Analyzer, prepare_model
    from kronfluence.arguments import FactorArguments, ScoreArguments
    from kronfluence.task import Task

    class Prediction(Task):
        def compute_train_loss(self, batch, model, sample=False):
            logits = model(batch[0])
            labels = torch.distributions.Categorical(logits=logits.detach()).sample() if sample else batch[1]
            return cross_entropy(logits, labels).sum()

        def compute_measurement(self, batch, model):
            return self.compute_train_loss(batch, model)

    task = Prediction()
    prepared = prepare_model(copy.deepcopy(model), task)
    analyzer = Analyzer("model", prepared, task, cpu=True, disable_tqdm=True, output_dir=str(directory))
    start = time.perf_counter()
    arguments = FactorArguments(strategy=strategy, use_empirical_fisher=empirical)
    options = {"per_device_batch_size": BATCH, "factor_args": arguments, "overwrite_output_dir": True}
    analyzer.fit_all_factors("factors", train, **options)
    fitted = time.perf_counter()
    analyzer.compute_pairwise_scores(
        "scores",
        "factors",
        queries,
        train,
        per_device_query_batch_size=BATCH,
        per_device_train_batch_size=BATCH,
        score_args=ScoreArguments(damping_factor=None),  # 0.1 times the mean eigenvalue
        overwrite_output_dir=True,
    )
    end = time.perf_counter()
    return analyzer.load_pairwise_scores("scores")["all_modules"], fitted - start, end - fitted


# --- dattri --------------------------------------------------------------------------------------------------------


def of_dattri(model, states, output_fn, train, queries, dim):
    """TRAK scores (queries, training samples) of models with these states, without damping, which is its default."""
    from dattri.algorithm import TRAKAttributor
    from dattri.task import AttributionTask

    def outputs(parameters, sample):
        net = partial(functional_call, model, parameters)
        return outputs_and_weights(output_fn(net, tuple(column[None] for column in sample)))

    def output(parameters, sample):
        return outputs(parameters, sample)[0].squeeze()

    def probability(parameters, sample):
        return 1 - outputs(parameters, sample)[1].squeeze()

    task = AttributionTask(output, model, states)
    attributor = TRAKAttributor(task, probability, {"proj_dim": dim})
    with sdpa_kernel(SDPBackend.MATH):  # fused attention has no batching rule
        attributor.cache(DataLoader(train, BATCH))
        with torch.no_grad():
            return attributor.attribute(DataLoader(queries, BATCH)).T.contiguous()


# --- bergson -------------------------------------------------------------------------------------------------------


def of_bergson(model, train, queries, directory):
    """EK-FAC scores (queries, training samples) of the language model, with the settings of bergson."""
    from bergson.config.config import (
        DataConfig,
        HessianConfig,
        HessianPipelineConfig,
        IndexConfig,
        PreprocessConfig,
        QuerySetConfig,
        ScoreConfig,
    )
    from bergson.data import load_scores
    from bergson.hessians.pipeline import hessian_pipeline
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    save_for_transformers(model, directory / "model")
    vocabulary = {str(letter): letter for letter in range(LETTERS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory / "model")
    for name, sequences in (("train", train), ("queries", queries)):
        Dataset.from_dict({"input_ids": letters(sequences).tolist()}).save_to_disk(directory / name)
    hessian_pipeline(
        IndexConfig(
            run_path=str(directory / "run"),
            model=str(directory / "model"),
            data=DataConfig(dataset=str(directory / "train")),
            overwrite=True,
        ),
        HessianConfig(method="kfac", ev_correction=True),
        ScoreConfig(),
        PreprocessConfig(),
        HessianPipelineConfig(query=QuerySetConfig(dataset=str(directory / "queries"))),
    )
    return torch.from_numpy(load_scores(directory / "run/scores")[:].T.copy())


def save_for_transformers(model, directory):
    """Save the language model as one that AutoModelForCausalLM of transformers loads in this process."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

    class LettersConfig(PreTrainedConfig):
        model_type = "letters"

    class Letters(PreTrainedModel):
        config_class = LettersConfig

        def __init__(self, config):
            super().__init__(config)
            self.model = LanguageModel()
            self.model.positions = nn.Embedding(
                LENGTH + 1, self.model.positions.embedding_dim
            )  # also of the last letter
            self.post_init()

        def get_input_embeddings(self):
            return self.model.letters

        def forward(self, input_ids, **_):
            return CausalLMOutput(logits=self.model(input_ids))

    AutoConfig.register("letters", LettersConfig, exist_ok=True)
    AutoModelForCausalLM.register(LettersConfig, Letters, exist_ok=True)
    copied = Letters(LettersConfig())
    state = dict(model.state_dict())
    state["positions.weight"] = F.pad(state["positions.weight"], (0, 0, 0, 1))
    copied.model.load_state_dict(state)
    copied.save_pretrained(directory)


# --- captum --------------------------------------------------------------------------------------------------------


def beside_captum(model, checkpoints, train, queries):
    from captum.influence import TracInCP

    start = time.perf_counter()
    ours = sw.influence(model, losses, DataLoader(train, BATCH), DataLoader(queries, BATCH), checkpoints)
    middle = time.perf_counter()
    rates = dict(enumerate(rate for _, rate in checkpoints))

    def load_checkpoint(model, number):
        model.load_state_dict(checkpoints[number][0])
        return rates[number]

    tracer = TracInCP(
        copy.deepcopy(model),
        train,
        list(rates),
        load_checkpoint,
        loss_fn=nn.CrossEntropyLoss(reduction="sum"),
        batch_size=BATCH,
        sample_wise_grads_per_batch=True,
    )
    theirs = tracer.influence(tuple(default_collate(list(queries))))
    end = time.perf_counter()
    difference = relative_difference(ours, theirs)
    print(f"TracIn, largest difference from captum / largest score          {difference:.1e}")
    print(f"TracIn over {len(checkpoints)} checkpoints, seconds: samplewise, captum", end="        ")
    print(f"{middle - start:.1f}, {end - middle:.1f}")
    return ["TracIn differs from captum's"] if difference > 1e-6 else []


def relative_difference(ours, theirs):
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


if __name__ == "__main__":
    main()
