"""Check of the order of base classes for mixins."""

from __future__ import annotations


def check_comes_first(cls: type, mixin: type, base: type) -> None:
    """Raise TypeError if the methods of `base` take precedence over those of the mixin, which then have no effect."""
    order = cls.__mro__
    if base in order and order.index(base) < order.index(mixin):
        bases = [each.__name__ for each in cls.__bases__]
        first = sorted(cls.__bases__, key=lambda each: not issubclass(each, mixin))
        raise TypeError(
            f"{mixin.__name__} must come before {base.__name__} in the bases of a class; found "
            f"{cls.__name__}({', '.join(bases)}). Write class {cls.__name__}"
            f"({', '.join(each.__name__ for each in first)})."
        )
