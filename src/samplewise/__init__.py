"""samplewise: every sample's gradient within reach, and what one update is as a value."""

from samplewise.checking import check as check
from samplewise.engine.gradients import Gradients as Gradients
from samplewise.engine.gradients import gradients as gradients
from samplewise.engine.inputs import input_gradients as input_gradients
from samplewise.errors import BatchError as BatchError
from samplewise.errors import CheckpointError as CheckpointError
from samplewise.errors import CheckpointWarning as CheckpointWarning
from samplewise.errors import GraphError as GraphError
from samplewise.errors import LossesError as LossesError
from samplewise.errors import NonFiniteGradientError as NonFiniteGradientError
from samplewise.errors import NonFiniteLossError as NonFiniteLossError
from samplewise.errors import ParameterError as ParameterError
from samplewise.errors import SamplesInteractError as SamplesInteractError
from samplewise.errors import SamplesMayInteractWarning as SamplesMayInteractWarning
from samplewise.errors import SamplewiseError as SamplewiseError
from samplewise.errors import TrainingWarning as TrainingWarning
from samplewise.errors import TransformError as TransformError
from samplewise.loop.trainer import Trainer as Trainer
from samplewise.scan import scan as scan
from samplewise.step.microbatch import auto as auto
from samplewise.step.rules import sgd as sgd
from samplewise.step.step import Step as Step
from samplewise.step.update import Update as Update
from samplewise.transforms.align import align as align
from samplewise.transforms.chain import chain as chain
from samplewise.transforms.clip import clip as clip
from samplewise.transforms.conformance import check_transform as check_transform
from samplewise.transforms.drop import drop as drop
from samplewise.transforms.group import group as group
from samplewise.transforms.noise import noise as noise
from samplewise.transforms.normalize import normalize as normalize
from samplewise.transforms.weight import weight as weight

__all__ = [
    "BatchError",
    "CheckpointError",
    "CheckpointWarning",
    "Gradients",
    "GraphError",
    "LossesError",
    "NonFiniteGradientError",
    "NonFiniteLossError",
    "ParameterError",
    "SamplesInteractError",
    "SamplesMayInteractWarning",
    "SamplewiseError",
    "Step",
    "Trainer",
    "TrainingWarning",
    "TransformError",
    "Update",
    "align",
    "auto",
    "chain",
    "check",
    "check_transform",
    "clip",
    "drop",
    "gradients",
    "group",
    "input_gradients",
    "noise",
    "normalize",
    "scan",
    "sgd",
    "weight",
]
