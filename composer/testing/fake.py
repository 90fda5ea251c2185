"""A fake engine that does real work, except for one fault."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import torch.fx

from composer import _torch
from composer.backends.base import Dialect
from composer.testing import faults
from composer.testing.faults import Fault


class FakeBackend:
    """A Dynamo backend that does real work through AOTAutograd, except for one fault.

    ``compiles`` and ``calls`` count its compiles and its calls.

    Args:
        fault: The fault; ``None`` is an engine without a fault.
        at: The call from which on the fault happens; the first call is 1. By default, the fault
            happens in the compile if it can, else at every call. ``fails_in_backward`` counts runs
            of the backward. Calls that composer makes while it verifies or measures count too.
        seconds: How long ``slow`` takes.
        name: What reports call it; by default ``fake_`` and the fault.

    Raises:
        ValueError: there is no such fault, or no such call.
    """

    dialect: ClassVar[Dialect] = "any"

    def __init__(
        self,
        fault: Fault | str | None = None,
        at: int | None = None,
        *,
        seconds: float = 0.1,
        name: str | None = None,
    ) -> None:
        if at is not None and at < 1:
            raise ValueError(f"at is the number of a call, the first being 1, not {at}")
        self.fault = None if fault is None else Fault(fault)
        self.at = at
        self.seconds = seconds
        self.__name__ = name or f"fake_{self.fault or 'honest'}"
        self.compiles = 0
        self.calls = 0
        self._strike_compile: Callable[..., Any] = lambda *_: faults.GO_ON
        self._strike_call: Callable[..., Any] | None = None
        if at is None and self.fault in faults.WHILE_COMPILING:
            self._strike_compile = faults.WHILE_COMPILING[self.fault]
        elif self.fault in faults.AT_CALLS:
            self._strike_call = faults.AT_CALLS[self.fault]
        elif self.fault is not None:
            raise ValueError(f"{self.fault} strikes while compiling, not at a call")

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[()]]:
        """Pickle as a new engine without counts, so that ``isolate`` can send it to a child."""
        again = functools.partial(FakeBackend, seconds=self.seconds, name=self.__name__)
        return functools.partial(again, self.fault, self.at), ()

    def __call__(self, gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        """Compile, with the fault if it happens in the compile."""
        self.compiles += 1
        instead = self._strike_compile(self, gm, example_inputs)
        if instead is not faults.GO_ON:
            return instead
        first_faulty = self.at or 1
        if self.fault is Fault.FAILS_IN_BACKWARD:
            honest = faults.failing_backward(gm, example_inputs, first_faulty)
        else:
            honest = _torch.dynamo.lookup_backend("aot_eager")(gm, example_inputs)
        numbers = itertools.count(1)

        def run(*args: Any) -> Any:
            self.calls += 1
            if self._strike_call is None or next(numbers) < first_faulty:
                return honest(*args)
            return self._strike_call(self, honest, args)

        return run
