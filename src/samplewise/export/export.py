"""`sw.export_update`: forward pass, backward pass, transforms and optimizer of one update as a file."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from samplewise.core.batches import leaves, length
from samplewise.core.state import snapshot
from samplewise.core.text import Table, Tabular, notify_if_slow, plural
from samplewise.errors import ExportError, SamplewiseError
from samplewise.export import aotinductor, executorch
from samplewise.export.graph import Forward, trace_program
from samplewise.export.runtime import quiet_imports
from samplewise.export.verification import Deviation, verify
from samplewise.step.compiled import CannotCompile, inductor
from samplewise.step.compiled.optim import FORMULAS, Formula, formula_of
from samplewise.step.step import Step

FORMATS: dict[str, ModuleType] = {".pte": executorch, ".pt2": aotinductor}
TOLERANCE = 1e-5


@dataclass(frozen=True, repr=False)
class ExportedUpdate(Tabular):
    """Summary of an exported update.

    bytes: size of the file. constant, mutable, scratch: bytes of memory for tensors that stay, for parameters and
    optimizer state, and for intermediate results; scratch is None if it is allocated at run time.
    operators: kernels that the runtime must have. state: shapes by name, in the order of get_state and set_state.
    inputs: shapes by name, in the order of update. deviation: measured by the verification.
    """

    path: Path
    bytes: int
    constant: int
    mutable: int
    scratch: int | None
    operators: list[str]
    methods: list[str]
    inputs: dict[str, tuple[int, ...]]
    state: dict[str, tuple[int, ...]]
    deviation: Deviation

    def _table(self) -> Table:
        scratch = "allocated at run time" if self.scratch is None else f"{self.scratch:,} bytes"
        inputs = ", ".join(f"{name} {list(shape)}" for name, shape in self.inputs.items())
        rows = [
            ("file", f"{self.bytes:,} bytes"),
            ("memory: constant", f"{self.constant:,} bytes"),
            ("memory: parameters and optimizer state", f"{self.mutable:,} bytes"),
            ("memory: intermediate results", scratch),
            ("methods", ", ".join(self.methods)),
            ("inputs of update", inputs),
            ("operators", f"{len(self.operators)}, see .operators" if self.operators else "compiled into the file"),
            ("compared with uncompiled updates", str(self.deviation)),
        ]
        return Table(("exported update", str(self.path)), rows, "")


def export_update(
    step: Step,
    path: str | os.PathLike[str],
    example: Any,
    predict: bool | Callable[[nn.Module, Any], Any] = True,
) -> ExportedUpdate:
    """Export one update of `step` to a file that runs without Python, verify it, and print and return a summary.

        step = sw.Step(model, optimizer, loss_fn, samples=1, transforms=[sw.clip(1.0)])
        sw.export_update(step, "update.pte", example=(x[:1], y[:1]))

    path: ends in .pte for an ExecuTorch program, which runs on phones and microcontrollers, or in .pt2 for a package
    of AOTInductor, which runs in C++ programs with libtorch.
    example: a batch of `step.samples` samples. Shapes and dtypes are fixed; its values are not stored, and those near
    them are used in the verification.
    predict: True (default): the file has a method predict, which returns model(x) in eval mode for batches (x, ...).
    A function (model, batch) -> outputs replaces this call. False: no such method.

    Methods of the file:
    update(*batch, lr) -> loss, norm, weight: the losses of the samples, norms of their gradients (of the update if no
    transform needs those), and their weights. Changes parameters and optimizer state in place. `lr` is a float32
    scalar, or one number for each param group; schedulers and other settings of the optimizer are not inputs.
    predict(x) -> outputs.   get_state() -> tensors.   set_state(*tensors).

    The state starts with the current parameters and optimizer state. An update with a non-finite loss or gradient
    changes nothing, unless the step has on_nonfinite="ignore".

    Verification: a new process loads the file and makes 200 updates. If losses, norms, weights or changes of the state
    differ from those of uncompiled updates by more than 1e-5 (relative), ExportError is raised and no file remains.
    """
    target = Path(path)
    writer = _format_of(target)
    with quiet_imports():
        writer.require()
    formula = _check_step(step)
    _check_example(step, example)
    forward = _forward(predict, example)
    notify = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    with notify_if_slow(notify, f"exporting and verifying {target} ..."), _new_file(target) as temporary:
        with _refusals(), quiet_imports(), torch.enable_grad():
            inductor.load_compiler()
            program = trace_program(step, formula, example, forward, writer.decompositions())
            memory, operators = writer.write(program, temporary)
        deviation = verify(step, temporary, program, example, TOLERANCE)
    result = ExportedUpdate(
        path=target,
        bytes=target.stat().st_size,
        constant=memory.constant,
        mutable=memory.mutable,
        scratch=memory.scratch,
        operators=operators,
        methods=[*(["update"] if program.predict is None else ["update", "predict"]), *writer.STATE_METHODS],
        inputs={name: tuple(t.shape) for name, t in program.update.inputs.items()},
        state={name: tuple(t.shape) for name, t in program.state.items()},
        deviation=deviation,
    )
    print(result._table().text().strip())
    return result


# --- arguments --------------------------------------------------------------------------------------------------------


def _format_of(path: Path) -> ModuleType:
    if path.suffix not in FORMATS:
        raise ValueError(f"path must end in .pte (ExecuTorch) or .pt2 (AOTInductor); found {str(path)!r}.")
    if not path.absolute().parent.is_dir():
        raise FileNotFoundError(f"path must be in a directory that exists; found {str(path)!r}.")
    return FORMATS[path.suffix]


def _check_step(step: Step) -> Formula:
    """Raise unless the updates of the step can be exported; return the formula of its optimizer."""
    if not isinstance(step, Step):
        raise TypeError(f"step must be a sw.Step; found {type(step).__name__}.")
    config = step.config
    chain = config.transforms
    evaluator = step._evaluator
    formula = formula_of(step.optimizer)
    if formula is None:
        names = ", ".join(kind.__name__ for kind in FORMULAS)
        raise ExportError(
            f"the optimizer must be one of torch.optim's {names}, or sw.sgd, without hooks and tensors as settings; "
            f"found {type(step.optimizer).__name__}."
        )
    reasons = {
        "privacy=: the noise of a private update needs a secure generator and an accountant": step.privacy is not None,
        "several ranks": step._windows.ranks.exchanges,
        f"precision={config.precision!r}": config.precision not in (None, "32"),
        "transforms that add noise": bool(chain.on_sum),
        "transforms that group samples or use reference gradients": bool(chain.grouping or chain.samples.references),
        f"transforms with a state, such as {chain!r}": bool(chain.states),
        'aggregate=sw.per("group")': config.aggregate is not None and config.aggregate.key is not None,
        "a model that is not in CPU memory": evaluator.trained.device.type != "cpu",
        "samples that are accumulated but not applied": step._has_pending_samples,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ExportError(f"the update cannot be exported with {reason}.")
    if type(config.samples) is not int:
        raise ExportError(
            f"an exported update has a fixed number of samples; found samples={config.samples}. Write samples=1."
        )
    if any(p.dtype != torch.float32 for p in evaluator.trained.trainable().values()):
        raise ExportError("exported updates compute in float32; found trained parameters of another dtype.")
    # Raise if the first update of the optimizer differs from later ones, and it was not made yet.
    for group in step.optimizer.param_groups:
        state = getattr(step.optimizer, "state", {})
        buffers = [state.get(p, {}).get("momentum_buffer") for p in group["params"]]
        if group.get("dampening") and "momentum_buffer" in formula.states(group) and None in buffers:
            raise ExportError(
                f"the first update of SGD with dampening={group['dampening']} differs from the later ones; found no "
                "update yet. Make one update before the export."
            )
    return formula


def _check_example(step: Step, example: Any) -> None:
    tensors = [leaf for leaf in leaves(example) if isinstance(leaf, Tensor)]
    if not tensors:
        raise ExportError(f"example must be a batch with tensors; found {type(example).__name__}.")
    rows = length(example)
    if rows != step.samples:
        raise ExportError(
            f"example must be a batch of {plural(step.samples or 0, 'sample')}, as step.samples says; found {rows}. "
            f"Write example=(x[:{step.samples}], y[:{step.samples}])."
        )
    evaluator = step._evaluator
    restore = snapshot(*evaluator.modules)
    try:  # tracing would report mistakes such as a wrong dtype less clearly
        with evaluator.trained.without_grads():
            evaluator.losses(example)
    except SamplewiseError:
        raise
    except Exception as error:
        raise ExportError(f"example must be a batch that the loss function accepts; found: {error}") from error
    finally:
        restore()


def _forward(predict: Any, example: Any) -> Forward | None:
    if predict is False:
        return None
    if callable(predict):
        return predict
    if predict is not True:
        raise TypeError(f"predict must be True, False or a function (model, batch); found {type(predict).__name__}.")
    if not isinstance(example, (tuple, list)) or not isinstance(example[0], Tensor):
        raise ExportError(
            "predict=True calls model(x) for batches (x, ...); found a batch of another structure. Write "
            "predict=lambda model, batch: model(...), or predict=False."
        )
    return lambda model, batch: model(batch[0])


# --- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def _new_file(path: Path) -> Iterator[Path]:
    """Path of a temporary file that replaces `path` after the block, or is deleted if the block raises."""
    with tempfile.TemporaryDirectory(prefix=".export-", dir=path.absolute().parent) as directory:
        temporary = Path(directory) / path.name
        yield temporary
        temporary.replace(path)


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn errors of tracer, exporter and compiler into ExportError."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    try:
        yield
    except SamplewiseError:
        raise
    except CannotCompile as reason:
        raise ExportError(f"the update cannot be exported: {reason}.") from None
    except GuardOnDataDependentSymNode as error:
        raise ExportError(
            "the update cannot be exported: a shape or a branch of the model or the loss function depends on the "
            "values of a tensor."
        ) from error
    except Exception as error:
        line = str(error).strip().partition("\n")[0].rstrip(".")
        raise ExportError(f"the update cannot be exported: {type(error).__name__}: {line}.") from error
