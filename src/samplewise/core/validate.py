"""Checks of objects and functions of users: attributes that are assigned, arguments that a function accepts, models."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from samplewise.core.text import did_you_mean


class CheckedAttributes:
    """Base class: after `_complete = True`, which a constructor sets at its end, assigning an unknown attribute or one
    of `_fixed` raises AttributeError. Subclasses of users may add attributes.

    _fixed: name -> how to change it; "" if only a new object helps.
    """

    _fixed: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:  # type checkers accept every attribute of a class with __setattr__

        def __setattr__(self, name: str, value: Any) -> None:
            if "_complete" in vars(self) and (name in self._fixed or not hasattr(self, name)):
                self._refuse(name)
            super().__setattr__(name, value)

    def _refuse(self, name: str) -> None:
        kind = type(self)
        if kind.__module__.partition(".")[0] != "samplewise" and name not in self._fixed:
            return  # an attribute of a user's subclass
        members = {key: member for base in reversed(kind.__mro__) for key, member in vars(base).items()}
        settable = [key for key, member in members.items() if isinstance(member, property) and member.fset]
        if name in self._fixed:
            remedy = self._fixed[name] or f"It is fixed when the {kind.__name__} is created: create a new one."
        else:
            remedy = did_you_mean(name, settable)
        rule = f"the attributes of a {kind.__name__} that can be assigned are {', '.join(settable)}"
        if not settable:
            rule = f"the attributes of a {kind.__name__} cannot be assigned"
        raise AttributeError(f"{rule}; found {name!r}. {remedy}".rstrip())


def accepts(function: Any, arguments: int) -> bool:
    """True if a function can be called with this number of positional arguments, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of functions written in C
        return True
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def parse_interval(name: str, every: Any, examples: Mapping[Any, str]) -> tuple[int, Any]:
    """Number and unit of the argument `name`, an interval such as "50up"; a number without a unit counts updates.
    `examples`: unit -> example for the error.
    """
    text = f"{every}up" if type(every) is int else every
    match = re.fullmatch(f"([1-9][0-9]*)({'|'.join(examples)})", text) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f"{name} must be a duration such as {' or '.join(examples.values())}; found {every!r}.")
    return int(match[1]), match[2]


def check_module(model: object, advice: str = "Pass the model.") -> None:
    """Raise TypeError unless the model is a torch.nn.Module, as Keras models with the torch backend are."""
    if not isinstance(model, nn.Module):
        refuse_keras(model)
        raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}. {advice}")


def refuse_keras(model: object) -> None:
    """Raise TypeError for a model of Keras with the TensorFlow or JAX backend. Keras is not imported for this."""
    layers = [cls for cls in type(model).__mro__ if cls.__name__ == "Layer"]
    of_keras = any(cls.__module__.partition(".")[0] in ("keras", "tf_keras") for cls in layers)
    if of_keras and not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module; found a Keras model ({type(model).__name__}) of another backend. Use "
            "samplewise.integrations.keras.gradients(model, x, y); or set KERAS_BACKEND=torch before keras is imported."
        )
