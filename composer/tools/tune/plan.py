"""Reads plans of what to tune: models, the shapes of each, and fields of the policy for them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from composer.backends import refuse_slip
from composer.errors import OptionError, UnknownNameError
from composer.policy import FormatVersion, read_policy
from composer.policy.sources import load
from composer.policy.wording import mistakes_in
from composer.tools.bench.workload import Workload


class _Model(BaseModel):
    """The fields of a model that a plan and its jobs share.

    Attributes:
        target: ``module:factory``, see :class:`~composer.tools.bench.workload.Workload`.
        training: True if gradients are on for the call.
        dynamic: ``torch.compile``'s ``dynamic``.
        options: Fields of :class:`~composer.Policy`, which override the policy in force.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    training: bool = False
    dynamic: bool | None = None
    options: dict[str, Any] = Field(default_factory=dict)


class Job(_Model):
    """One model with one set of ``arguments`` of the factory, to be compiled and called once."""

    arguments: dict[str, Any] = Field(default_factory=dict)

    @property
    def workload(self) -> Workload:
        """The model and its arguments."""
        return Workload(self.target, self.arguments)


class PlannedModel(_Model):
    """A model of a plan: a job for each of its ``shapes``, the factory's keyword arguments."""

    shapes: tuple[dict[str, Any], ...] = ({},)

    @field_validator("target")
    @classmethod
    def _of_two_parts(cls, target: str) -> str:
        place, _, name = target.rpartition(":")
        if not place or not name:
            raise ValueError("a target is module:factory, such as my_models:encoder")
        return target

    @field_validator("shapes")
    @classmethod
    def _at_least_one(cls, shapes: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        if not shapes:
            raise ValueError("without a shape there is nothing to tune; leave the key out for {}")
        return shapes

    @field_validator("options")
    @classmethod
    def _of_a_policy(cls, options: dict[str, Any]) -> dict[str, Any]:
        try:
            policy = read_policy(options)
            for each in policy.chain:
                refuse_slip(each.name)
        except (OptionError, UnknownNameError) as mistake:
            raise ValueError(str(mistake)) from None
        takes_the_first = "by" in policy.select.model_fields_set and policy.select.by == "first"
        if policy.locked or takes_the_first:
            raise ValueError("a plan measures: leave out select = 'first' and locked = true")
        return options

    def jobs(self) -> Iterator[Job]:
        """The jobs, one for each shape."""
        rest: dict[str, Any] = self.model_dump(exclude={"target", "shapes"})
        for shape in self.shapes:
            yield Job(target=self.target, arguments=shape, **rest)


class Plan(BaseModel):
    """A TOML file of models; ``version`` is that of the format."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: FormatVersion = 1
    models: tuple[PlannedModel, ...]

    @field_validator("models")
    @classmethod
    def _at_least_one(cls, models: tuple[PlannedModel, ...]) -> tuple[PlannedModel, ...]:
        if not models:
            raise ValueError("without a model there is nothing to tune")
        return models


def read_jobs(sources: list[str]) -> list[Job]:
    """Return the jobs of plans and of single factories, in the order given.

    Args:
        sources: Paths of TOML files, or ``module:factory``.

    Raises:
        OptionError: a plan has wrong keys or values, all of which the error names.
    """
    jobs: list[Job] = []
    for source in sources:
        if source.endswith(".toml"):
            jobs += itertools.chain.from_iterable(
                each.jobs() for each in _plan(Path(source)).models
            )
        elif ":" in source:
            jobs.append(Job(target=source))
        else:
            raise OptionError(f"{source!r} is neither a plan (a .toml file) nor module:factory")
    return jobs


def _plan(path: Path) -> Plan:
    table = load(path, "plan")
    try:
        return Plan.model_validate(table)
    except ValidationError as error:
        mistakes = mistakes_in(error, Plan)
        raise OptionError("; ".join(f"{path}: {each}" for each in mistakes)) from None
