"""The private names of torch that composer uses, and what is off where torch lacks one.

Torch may rename or remove a private name in any release. There are three kinds of private name:

- Composer cannot work without the names in :data:`ESSENTIAL`. If one is missing, the import of
  composer fails with a message.
- The engines that read ONNX cannot work without some others, and are ``unavailable`` without them
  (``tests/_torch/test_torch_names.py`` lists them).
- Any other name belongs to one feature. The function that uses the name declares it by the
  decorator :func:`optional`. If the name is missing, that function does less, and ``composer
  doctor`` and the record say which feature is off.
"""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

ESSENTIAL: Mapping[str, str] = {
    "torch._dynamo.convert_frame:compile_lock": "one compile at a time in the process",
    "torch._dynamo.exc:InvalidBackend": "a name in the chain that nobody registered",
    "torch._dynamo.exc:RestartAnalysis": "Dynamo's control flow, which no engine may swallow",
    "torch._dynamo.exc:SkipFrame": "Dynamo's control flow, which no engine may swallow",
    "torch._dynamo.source:ConstantSource": "tensors that passes add to a graph",
    "torch._functorch.config:patch": "the settings of AOTAutograd for one compile",
    "torch._guards:TracingContext": "the compile under way, and what AOTAutograd found out",
    "torch._guards:tracing": "compiles beside Dynamo's own",
    "torch._inductor.config:patch": "the settings of Inductor for one compile",
    "torch._inductor.custom_graph_pass:CustomGraphModulePass": "passes of Inductor's kinds",
    "torch._inductor.custom_graph_pass:CustomGraphPass": "passes of Inductor's kinds",
    "torch._inductor.custom_graph_pass:CustomPartitionerFn": "passes of Inductor's kinds",
    "torch._ops:HigherOrderOperator": "what a node of a graph calls",
    "torch._ops:OpOverload": "what a node of a graph calls",
    "torch._ops:OpOverloadPacket": "what a node of a graph calls",
    "torch._subclasses.fake_tensor:DataDependentOutputException": "sizes that only data tell",
    "torch._subclasses.fake_tensor:DynamicOutputShapeException": "sizes that only data tell",
    "torch._subclasses.fake_tensor:FakeTensor": "shapes without data",
    "torch._subclasses.fake_tensor:FakeTensorMode": "shapes without data",
    "torch._subclasses.fake_tensor:unset_fake_temporarily": "engines read real weights",
    "torch.utils._pytree:tree_flatten": "outputs that are nested",
    "torch.utils._pytree:tree_unflatten": "outputs that are nested",
}
"""The names that composer cannot work without, and what each is used for."""


@dataclass(frozen=True)
class Feature:
    """A feature that needs private names of torch, which may be missing.

    Attributes:
        what: The feature, in words that stand before "is off".
        names: The names, as ``"module:attribute"``.
    """

    what: str
    names: tuple[str, ...]

    @functools.cached_property
    def missing(self) -> tuple[str, ...]:
        """The names that torch lacks. They are looked up once."""
        return tuple(name for name in self.names if not has(name))

    def was_looked_up(self) -> bool:
        """True if :attr:`missing` is known already."""
        return "missing" in vars(self)

    def __str__(self) -> str:
        """Which feature is off, and why."""
        return f"{self.what} is off: torch {torch.__version__} has no {', '.join(self.missing)}"


FEATURES: list[Feature] = []
"""All features that :func:`optional` has declared. The modules of this package declare them when
they are imported."""


def optional(
    what: str,
    *names: str,
    without: Callable[..., Any] = lambda *args, **kwargs: None,
    lazily: bool = False,
) -> Callable[[F], F]:
    """Declare which private names of torch the decorated function needs, and for which feature.

    If torch has all of the names, the function is called as it is written. If one is missing,
    ``without`` is called in its place, and :func:`off` lists the feature. So the function itself
    need not check for the names.

    Args:
        what: The feature that is off where a name is missing, in words that stand before "is off".
        names: The names, as ``"module:attribute"``.
        without: Takes the same arguments as the function. By default it does nothing and returns
            ``None``.
        lazily: True to look the names up at the first call of the function, and not at its
            definition. Use it for names in modules that take long to import.
    """
    feature = Feature(what, names)
    FEATURES.append(feature)

    def mark(function: F) -> F:
        if not lazily:
            return cast(F, without) if feature.missing else function

        @functools.wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (without if feature.missing else function)(*args, **kwargs)

        return cast(F, chosen)

    return mark


def optional_value(what: str, name: str, *, without: Any) -> Any:
    """A private value of torch, or ``without`` if torch lacks it. See :func:`optional`."""
    feature = Feature(what, (name,))
    FEATURES.append(feature)
    return without if feature.missing else pkgutil.resolve_name(name)


def off(*, look: bool) -> list[str]:
    """A sentence for each feature that is off because this torch lacks a name.

    Args:
        look: True to look up also the names of ``lazily`` features that were not called yet. That
            may take seconds.
    """
    features = FEATURES if look else filter(Feature.was_looked_up, FEATURES)
    return sorted({str(each) for each in features if each.missing})


def require_essential() -> None:
    """Check that torch has all names that composer cannot work without.

    Raises:
        ImportError: a name is missing. The message lists the missing names and their uses.
    """
    missing = [f"{name} ({what})" for name, what in ESSENTIAL.items() if not has(name)]
    if missing:
        raise ImportError(
            f"composer cannot work with torch {torch.__version__}, which lacks {', '.join(missing)}"
        )


def has(name: str) -> bool:
    """True if torch has a name, given as ``"module:attribute"``."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True
