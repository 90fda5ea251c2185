"""``locked = "warn"``: a graph that the lock does not know is compiled as without a lock."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from common import compiled, last
from locks import LOCK, TITLE, cosine, differences, edit, lock, locked_for, program, refused
from pydantic import ValidationError
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer.errors import FallbackWarning, LockError, OptionError
from composer.policy import Policy
from composer.testing import FakeBackend


def warned(x: torch.Tensor, **options: Any) -> list[str]:
    """What the compile of ``cosine`` for an input warned of."""
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = compiled(cosine, locked="warn", **options)(x)
    torch.testing.assert_close(answer, cosine(x))
    return [str(each.message) for each in caught if each.category is FallbackWarning]


def test_unknown_graph_is_compiled_by_the_chain_with_one_warning_and_a_note() -> None:
    """As the policy has it without a lock; a graph that is known has neither."""
    engine = FakeBackend(name="vendor")
    options = {"chain": ["aot_eager", engine], "select": "first"}
    locked_for(**options)
    edit(lambda table: table["graphs"][0].update(engine="vendor"))
    assert warned(torch.ones(4), **options) == []
    assert (last().chosen, last().lock.unlocked) == ("vendor", "")
    (told,) = warned(torch.ones(5), **options)
    assert last().chosen == "aot_eager"
    change = "inputs changed: l_x_: float32[4] on cpu -> l_x_: float32[5] on cpu"
    assert f"lock file '{LOCK.absolute()}' does not hold graph 1 of {TITLE}" in told
    assert change in told
    assert told.endswith("graph 3 [0/0] runs on aot_eager, as it would without a lock")
    assert told.startswith(last().lock.unlocked)
    assert last().lock.unlocked in str(composer.report())
    assert warned(torch.ones(5), **options) == []  # it is one warning for each graph
    assert change in last().lock.unlocked
    assert len(warned(torch.ones(6), **options)) == 1


def test_unknown_graph_is_measured_where_the_policy_measures() -> None:
    """A known one is not."""
    options = {"chain": [FakeBackend(name="vendor"), "aot_eager"], "select": "fastest"}
    locked_for(**options)
    warned(torch.ones(4), **options)
    assert "timing" not in last().attempts[-1].engine
    warned(torch.ones(5), **options)
    assert all(each.timing for each in last().attempts)


@pytest.mark.parametrize("fault", ["raises", "returns_none"])
def test_candidate_of_the_lock_that_is_refused_now_is_followed_by_the_chain(fault: str) -> None:
    """It is tried first, wherever it stands; the others are not barred, and eager is last."""
    options = {"chain": ["aot_eager", FakeBackend(name="vendor")]}
    locked_for(**options)
    edit(lambda table: table["graphs"][0].update(engine="vendor"))
    broken = {"chain": ["aot_eager", FakeBackend(fault, name="vendor")]}
    (told,) = warned(torch.ones(4), **broken)
    assert "vendor" in told
    assert last().chosen == "aot_eager"
    assert [each.backend for each in last().attempts] == ["vendor", "aot_eager"]
    assert last().lock.unlocked == ""
    chain = [FakeBackend(fault, name="vendor")]
    locked_for(chain=[FakeBackend(name="vendor")])
    warned(torch.ones(4), chain=chain)
    assert last().chosen == "eager"


def test_candidate_of_the_lock_that_fails_at_a_call_is_followed_by_the_chain() -> None:
    """Where ``"raise"`` leaves eager."""
    engine = FakeBackend(name="vendor")
    locked_for(chain=["aot_eager", engine])
    edit(lambda table: table["graphs"][0].update(engine="vendor"))
    chosen = {}
    for locked in ("raise", "warn"):
        torch.compiler.reset()
        composer.reset()
        fails = FakeBackend("raises", at=2, name="vendor")
        f = compiled(cosine, "aot_eager", fails, locked=locked)
        f(torch.ones(4))
        with pytest.warns(FallbackWarning, match="raised_at_runtime"):
            f(torch.ones(4))
        torch.testing.assert_close(f(torch.ones(4)), cosine(torch.ones(4)))
        chosen[locked] = last().chosen
    assert chosen == {"raise": "eager", "warn": "aot_eager"}


def test_eager_of_the_lock_needs_no_place_in_the_chain() -> None:
    """It is tried first, too."""
    options = {"chain": ["aot_eager"]}
    locked_for(**options)
    edit(lambda table: table["graphs"][0].update(engine="eager"))
    assert warned(torch.ones(4), **options) == []
    assert last().chosen == "eager"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"torch": "2.12.0"}}, "torch 2.12.0 in the lock"),
        ({"engine": "stranger:backend"}, "stranger:backend, which it names, is not in the chain"),
    ],
)
def test_versions_and_chains_that_differ_warn_as_well(change: dict[str, Any], said: str) -> None:
    """The lock is about another machine then, so it does not decide."""
    options = {"chain": ["aot_eager"]}
    locked_for(**options)
    edit(lambda table: table["versions"].update(change.get("versions", {})))
    edit(lambda table: table["graphs"][0].update(engine=change.get("engine", "aot_eager")))
    (told,) = warned(torch.ones(4), **options)
    assert said in told
    assert last().chosen == "aot_eager"


@pytest.mark.parametrize("text", [None, "[versions\n"])
def test_missing_or_malformed_lock_is_an_error_all_the_same(text: str | None) -> None:
    """It is the user's mistake, and comes at the first compile."""
    if text is not None:
        LOCK.write_text(text)
    assert "cannot be read" in str(refused(chain=["eager"], locked="warn"))


def test_strict_raises_for_the_candidate_of_the_lock() -> None:
    """As for any other that is not accepted."""
    locked_for(chain=[FakeBackend(name="vendor"), "aot_eager"])
    chain = [FakeBackend("raises", name="vendor"), "aot_eager"]
    with pytest.raises(BackendCompilerFailed, match="vendor failed"):
        compiled(cosine, locked="warn", strict=True, chain=chain)(torch.ones(4))


def test_filter_makes_an_error_of_the_warning() -> None:
    """For who wants it in CI."""
    locked_for(chain=["eager"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        with pytest.raises(BackendCompilerFailed, match="does not hold graph 1"):
            compiled(cosine, chain=["eager"], locked="warn")(torch.ones(5))


@pytest.mark.parametrize("value", [True, "raise"])
def test_true_is_another_word_for_raise(value: Any) -> None:
    """As TOML and Python spell it."""
    locked_for(chain=["eager"])
    error = refused(torch.ones(5), chain=["eager"], locked=value)
    assert isinstance(error, LockError)


@pytest.mark.parametrize("value", ["warm", 2, None])
def test_other_words_are_a_mistake(value: Any) -> None:
    """The error has those that are accepted."""
    with pytest.raises(OptionError, match="'raise' or 'warn'"):
        composer.configure({"defaults": {"locked": value}})
    with pytest.raises(ValidationError):
        Policy(locked=value)


def test_check_names_what_a_locked_policy_only_warns_of() -> None:
    """And exits with 1, so that CI sees what production compiles unlocked."""
    Path("composer.toml").write_text("[defaults]\nchain = ['aot_eager']\nlocked = 'warn'\n")
    program()
    lock()
    assert differences() == []
    program("compiled(torch.ones(4))", "compiled(torch.ones(4, 2).double())")
    assert differences() == ["graph 1 of __main__.f: new; the lock does not hold it"]
