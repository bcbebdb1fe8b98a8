"""TRAK of samplewise and of traker on the same projection matrix: largest difference, relative to the largest score.

    python benchmarks/attribution_trak_peers.py

Needs traker, which divides (Phi^T Phi + lambda)^-1 by the mean of its absolute entries, for the sake of float16. This
factor, one for each model, is multiplied back here: samplewise uses the formula of the paper.
"""

from __future__ import annotations

import logging
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import samplewise as sw

logging.getLogger("STORE").setLevel(logging.ERROR)


def make_task(models: int, train: int, queries: int, features: int = 20, classes: int = 5):
    """Randomly initialized models, training and query samples."""
    torch.manual_seed(0)
    nets = [
        nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, classes))
        for _ in range(models)
    ]
    data = [(torch.randn(n, features), torch.randint(classes, (n,))) for n in (train, queries)]
    return nets, *data


def projection_matrix(model: nn.Module, dim: int, seed: int) -> Tensor:
    """Matrix (parameters, dim) of `g.project`."""
    parts = []
    for name, p in model.named_parameters():
        identity = torch.eye(p.numel()).view(-1, *p.shape)
        q = torch.zeros_like(p, requires_grad=True)
        parts.append(sw.gradients((identity * q).flatten(1).sum(1), {name: q}).project(dim, seed))
    return torch.cat(parts)


def of_traker(directory: Path, models: list[nn.Module], train, queries, dim: int, damping: float) -> Tensor:
    """Scores (queries, training samples) of traker with the projections of samplewise."""
    from trak import TRAKer
    from trak.projectors import AbstractProjector
    from trak.score_computers import BasicScoreComputer

    class Ours(AbstractProjector):
        def __init__(self) -> None:
            super().__init__(0, dim, 0, "rademacher", "cpu")

        def project(self, grads, model_id: int) -> Tensor:
            order = [name for name, _ in models[0].named_parameters()]
            rows = torch.cat([grads[name].flatten(1) for name in order], 1) if isinstance(grads, dict) else grads
            return rows @ projection_matrix(models[0], dim, model_id)

        def free_memory(self) -> None: ...

    class Unscaled(BasicScoreComputer):
        def get_x_xtx_inv(self, grads: Tensor, xtx: Tensor) -> Tensor:
            self.lambda_reg = damping * float(xtx.trace()) / dim
            inverse = torch.linalg.inv((xtx + self.lambda_reg * torch.eye(dim)).float())
            return super().get_x_xtx_inv(grads, xtx) * inverse.abs().mean()

    traker = TRAKer(
        model=models[0],
        task="image_classification",
        train_set_size=len(train[1]),
        save_dir=str(directory),
        device="cpu",
        projector=Ours(),
        proj_dim=dim,
        score_computer=Unscaled,
        use_half_precision=False,
        logging_level=logging.ERROR,
    )
    states = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    for number, state in enumerate(states):
        traker.load_checkpoint(state, model_id=number)
        traker.featurize(train, num_samples=len(train[1]))
    traker.finalize_features()
    for number, state in enumerate(states):
        traker.start_scoring_checkpoint("queries", state, model_id=number, num_targets=len(queries[1]))
        traker.score(queries, num_samples=len(queries[1]))
    scores = torch.from_numpy(traker.finalize_scores("queries").copy()).T
    models[0].load_state_dict(states[0])
    return scores


def compare(directory: Path, models: int, damping: float, dim: int, train: int, queries: int) -> float:
    """Largest difference of the scores of both libraries, relative to the largest score."""
    nets, of_train, of_queries = make_task(models, train, queries)
    theirs = of_traker(directory, nets, of_train, of_queries, dim, damping)
    ours = sw.trak(nets, sw.attribution.margin, [of_train], [of_queries], dim, damping=damping)
    return float((ours - theirs).abs().max() / theirs.abs().max())


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'models':>6}  {'damping':>7}  {'dim':>4}  difference  seconds")
    for models, damping, dim in ((1, 0.0, 64), (1, 0.1, 64), (3, 0.1, 64), (3, 0.0, 128), (3, 0.1, 256)):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            difference = compare(Path(directory), models, damping, dim, train=1000, queries=50)
        seconds = time.perf_counter() - start
        print(f"{models:6}  {damping:7}  {dim:4}  {difference:10.1e}  {seconds:.1f}")


if __name__ == "__main__":
    main()
