"""Approximate search in a store with FAISS, with its measured recall.

index.faiss   the index, as FAISS writes it
index.json    settings of index and store, checksum of the scales of the rows, recall; written last
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from samplewise.attribution.scoring import CHUNK
from samplewise.attribution.store import ProjectedStore, Queries
from samplewise.core.directory_lock import DirectoryLock
from samplewise.core.files import absolute, read_json, sha256, write_json
from samplewise.errors import StoreError
from samplewise.parallel.collectives import on_rank_zero

FORMAT = 1  # of index.json
CODES = {"float32": "Flat", "float16": "SQfp16", "int8": "SQ8"}  # entries of FAISS with the precision of the store
ROWS_PER_LIST = 64  # rows from which k-means computes the center of a list; FAISS warns below 39
REMEDY = "Remove its directory, and build the index again."
QUERIES = 100  # stored rows whose recall is measured


class FaissIndex:
    """Approximate search among the rows of a store, with an inverted file of FAISS: a query is compared with the rows
    of the lists whose centers have the largest inner products with it. Needs `pip install 'samplewise[faiss]'`.

    Opens the index in `directory`, or builds it, and measures its recall: the share of the exact top 10 that it finds,
    for 100 random stored rows as queries, each left out of its own results. The index is in memory, a row takes as many
    bytes as in the store. An index of a store that has changed is refused. With several ranks, rank 0 builds it.

    cosine, damping, layers: of the scores, see `ProjectedStore.search`
    factory: description of the index for `faiss.index_factory`; default: sqrt(n) lists, or fewer if n < 4096, with
        entries as precise as those of the store; no lists if n < 128
    probes: number of lists that a query is compared with; default: a sixteenth. More probes: higher recall, slower
    """

    def __init__(
        self,
        store: ProjectedStore,
        directory: str | os.PathLike[str],
        *,
        cosine: bool = False,
        damping: float | None = None,
        layers: Sequence[str] | None = None,
        factory: str | None = None,
        probes: int | None = None,
    ):
        self._faiss = load_faiss()
        if probes is not None and (type(probes) is not int or probes < 1):
            raise ValueError(f"probes must be an integer, 1 or more; found {probes!r}.")
        count = len(store)
        if count < 2:
            raise StoreError(f"an index needs a store with at least 2 samples; found {count}. Fill the store first.")
        self.store = store
        self.directory = absolute(directory)
        lists = min(round(math.sqrt(count)), max(count // ROWS_PER_LIST, 1))
        self.factory = factory or (f"IVF{lists}," if lists > 1 else "") + CODES[store.dtype]
        self.probes = probes
        self._options: dict[str, Any] = {"cosine": cosine, "damping": damping, "layers": layers and list(layers)}
        on_rank_zero(self._create)
        self.recall = self._checked_recall(read_json(self.directory / "index.json", StoreError, REMEDY))
        self._index = self._read()

    def __repr__(self) -> str:
        probes = "" if self.probes is None else f", probes={self.probes}"
        return f"FaissIndex({len(self.store)} samples, {self.factory!r}{probes}, recall={self.recall:.3f})"

    def search(self, queries: Queries, k: int = 10) -> tuple[Tensor, Tensor]:
        """About the k largest scores (Q, k) of each query, in descending order, and their samples (Q, k).

        The scores are those of the entries of the index. If the lists of a query have fewer than k samples, the rest
        are samples -1 with score -inf.
        """
        if type(k) is not int or k < 1:
            raise ValueError(f"k must be an integer, 1 or more; found {k!r}.")
        vectors = self.store.query_vectors(queries, **self._options)
        values, samples = map(torch.from_numpy, self._index.search(vectors.numpy(), k))
        return values.where(samples >= 0, -torch.inf), samples

    def recall_of(self, queries: Queries, k: int = 10, *, exclude: Sequence[int] | None = None) -> float:
        """Share of the exact k largest scores that the index finds, a mean over queries.

        exclude: a sample for each query that is not counted, such as the query itself; default None
        """
        wide = k + (exclude is not None)
        exact = self.store.search(queries, wide, **self._options)[1]
        if not len(exact):
            raise ValueError("queries must be at least one sample; found none.")
        approximate = self.search(queries, wide)[1]
        shares = []
        for *results, query in zip(exact.tolist(), approximate.tolist(), exclude or [-1] * len(exact), strict=True):
            best, answers = ([sample for sample in samples if sample != query][:k] for samples in results)
            shares.append(len(set(best) & set(answers)) / len(best))
        return sum(shares) / len(shares)

    # --- building --------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        """Build the index and write its files, unless they exist."""
        description = self.directory / "index.json"
        lock = DirectoryLock(
            self.directory, "index.lock", place="FAISS index", user="writer", remedy="build it again", error=StoreError
        )
        with nullcontext() if description.exists() else lock:
            if description.exists():
                return
            self._index = self._build()
            recall = self._recall_of_rows()
            path = self.directory / "index.faiss"
            temporary = path.with_name(".index.faiss.partial")
            self._faiss.write_index(self._index, str(temporary))
            os.replace(temporary, path)
            write_json(description, {**self._settings(), "recall": recall})
            self._index = None  # before it is read again, as on the other ranks

    def _build(self) -> Any:
        """Index of all rows, which are read twice: a random share for the centers of the lists, then all."""
        numbers = range(self.store.models)
        count = self.store._common_count(numbers)
        kernels = self.store._kernels(numbers, **self._options)
        try:
            index = self._faiss.index_factory(kernels.width, self.factory, self._faiss.METRIC_INNER_PRODUCT)
        except RuntimeError as why:
            raise ValueError(
                f"factory must be a description for faiss.index_factory; found {self.factory!r}: {why}"
            ) from why
        lists = self._set_probes(index)
        parts = [slice(start, min(start + CHUNK, count)) for start in range(0, count, CHUNK)]
        generator = torch.Generator().manual_seed(self.store.seed)
        samples = []
        for part in parts:
            selection = torch.rand(part.stop - part.start, generator=generator) < ROWS_PER_LIST * lists / count
            samples.append(kernels.of_rows(part)[selection])
        index.train(torch.cat(samples).numpy())
        for part in parts:
            index.add(kernels.of_rows(part).numpy())
        return index

    def _set_probes(self, index: Any) -> int:
        """Set the number of probes, and return the number of lists; 1024 for an index without lists."""
        ivf = self._faiss.try_extract_index_ivf(index)
        if ivf is not None:
            ivf.nprobe = self.probes or max(ivf.nlist // 16, 1)
        elif self.probes is not None:
            raise ValueError(
                f"probes needs an index with lists, such as 'IVF1024,SQ8'; found factory={self.factory!r}. "
                "Leave it out."
            )
        return 1024 if ivf is None else int(ivf.nlist)

    def _recall_of_rows(self) -> float:
        """Recall of random stored rows as queries."""
        generator = torch.Generator().manual_seed(self.store.seed)
        rows = torch.randperm(len(self.store), generator=generator)[:QUERIES].tolist()
        queries = {
            number: torch.cat([self.store.rows(row, row + 1, model_number=number) for row in rows])
            for number in range(self.store.models)
        }
        return self.recall_of(queries, min(10, len(self.store) - 1), exclude=rows)

    # --- files -----------------------------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        rows = sha256(file.scales(0, len(file)) for file in self.store._files)  # scales differ if rows do
        settings = {"factory": self.factory, "probes": self.probes, "samples": len(self.store), "rows": rows}
        return {"format": FORMAT, **self._options, **settings}

    def _checked_recall(self, content: Any) -> float:
        """Recall in index.json. Raises StoreError if the other values are not those of arguments and store."""
        content = content if isinstance(content, Mapping) else {}
        for name, expected in self._settings().items():
            if content.get(name) != expected:
                raise StoreError(
                    f"the index in {self.directory} must have {name}={expected!r}, as the arguments and the store; "
                    f"found {name}={content.get(name)!r}. Pass the same arguments, or use another directory."
                )
        return float(content.get("recall", math.nan))

    def _read(self) -> Any:
        path = self.directory / "index.faiss"
        try:
            index = self._faiss.read_index(str(path))
        except RuntimeError as why:
            raise StoreError(f"{path} must be an index of FAISS; found {why}. {REMEDY}") from why
        if index.ntotal != len(self.store):
            raise StoreError(f"{path} must have {len(self.store)} samples; found {index.ntotal}. {REMEDY}")
        self._set_probes(index)
        return index


def load_faiss() -> Any:
    """Import faiss, or raise ImportError with the command to install it."""
    try:
        return import_module("faiss")
    except ImportError:
        raise ImportError("sw.attribution.FaissIndex needs faiss: pip install 'samplewise[faiss]'") from None
