"""Options: what is accepted, and errors that name every mistake."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
import torch._inductor
from common import compiled, last
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer import Candidate, Policy, _torch
from composer.chain.candidates import ONLY_TABLES
from composer.dispatch import compose
from composer.errors import OptionError
from composer.policy import Facts
from composer.policy.resolution import resolve as resolve_for


def resolve(mode=None, options=None):
    """The policy for some graph."""
    graph = Facts("Net", "cpu", "float32", training=False, dynamic=False)
    return resolve_for(graph, ONLY_TABLES, mode, options).policy


def test_the_default_chain_has_three_engines() -> None:
    """TensorRT, Inductor, ONNX Runtime, in this order."""
    assert [each.name for each in Policy().chain] == ["tensorrt", "inductor", "onnxrt"]


def test_chain_accepts_names_tables_callables_and_candidates() -> None:
    """Four spellings of one thing."""
    chain = ["onnxrt", {"backend": "inductor", "options": {"freezing": True}}, torch.relu]
    policy = Policy(chain=[*chain, Candidate(backend="eager")])
    assert [each.name for each in policy.chain] == ["onnxrt", "inductor", "relu", "eager"]
    assert policy.chain[1].options == {"freezing": True}


NO_CANDIDATE = (
    r"^option 'chain\[0\].backend' is [^;]*: a candidate is a name, a callable or a table"
)
NUMBERS = (
    *("timeout", "memory_limit", "min_coverage", "select.seconds", "select.calls", "verify.every"),
    *("verify.rtol", "verify.atol", "precision.max_error", "on_runtime_error.retry_after"),
)
NUMBERS_OF_THE_PROCESS = (
    *("cache.failures", "cache.verdicts", "cache.artefacts", "distributed.timeout"),
)


def nested(path: str, value: object) -> dict:
    """``{"verify": {"every": value}}``."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chian": ["eager"]}, "unknown option 'chian'; did you mean 'chain'"),
        ({"strict": "perhaps"}, "option 'strict' is 'perhaps'"),
        ({"on_exhausted": "explode"}, "'eager' or 'raise'"),
        ({"freeze": "always"}, "'freeze' is 'always': Input should be 'auto', True or False"),
        (
            {"select": "speed"},
            "'select' is 'speed': Input should be 'first' or 'fastest', or a tab",
        ),
        ({"verify": True}, "'verify' is True: Input should be 'off', 'compile' or 'sample', or a"),
        ({"precision": {"mode": "fp8"}}, "'precision.mode' is 'fp8': Input should be 'fp32', 'bf"),
        (
            {"precision": {"mode": "auto", "allow": ["int4"]}},
            r"'precision.allow\[0\]' is 'int4': Input should be 'bf16' or 'int8'",
        ),
        ({"precision": {"mode": "auto", "allow": []}}, "'precision.allow' is .*at least 1 item"),
        ({"precision": {"allow": ["int8", "int8"]}}, "should name each precision once"),
        ({"select": {"secnds": 2}}, "unknown option 'select.secnds'; did you mean 'seconds'"),
        ({"select": {"seconds": float("inf")}}, "'select.seconds' is inf: Input should be a fini"),
        ({"timeout": float("inf")}, "option 'timeout' is inf: Input should be a finite number"),
        ({"chain": []}, "a chain needs a candidate"),
        ({"chain": "onnxrt"}, "a chain is a list"),
        ({"chain": [{"backend": "onnxrt", "optoins": {}}]}, r"chain\[0\].optoins'; did you mean"),
        ({"chain": [{"options": {}}]}, r"chain\[0\].backend"),
        *(({"chain": [each]}, NO_CANDIDATE) for each in (None, 3, "", ["onnxrt", {}])),
        *((nested(n, True), f"'{n}' is True: Input should be a number$") for n in NUMBERS),
        (
            {"max_autotune": True},
            "'max_autotune'; it is an option of Inductor, which stands in the",
        ),
        ({"freezing": True}, "'freezing'; it is an option of Inductor, which stands in the chain"),
        ({"session_config": {}}, "'session_config'; an option of an engine stands in the chain"),
        ({"cache": {"failures": 1}}, "'cache'; .cache. is a table of its own in a policy file"),
    ],
)
def test_mistakes_are_named(options: dict, message: str) -> None:
    """Key, what is accepted, nearest spelling."""
    with pytest.raises(OptionError, match=message):
        resolve(options=options)


@pytest.mark.parametrize("path", NUMBERS_OF_THE_PROCESS)
@pytest.mark.parametrize(
    ("value", "said"),
    [(True, "is True: Input should be a number"), (-1, "is -1"), (float("inf"), "is inf")],
)
def test_mistakes_in_what_holds_for_the_process_are_named(
    path: str, value: object, said: str
) -> None:
    """Under their tables."""
    with pytest.raises(OptionError, match=f"option '{path}' {said}"):
        composer.configure(nested(path, value))


@pytest.mark.parametrize(
    ("word", "table"),
    [
        ({"select": "fastest"}, {"select": {"by": "fastest"}}),
        ({"verify": "sample"}, {"verify": {"when": "sample"}}),
        ({"precision": "auto"}, {"precision": {"mode": "auto"}}),
        ({"on_runtime_error": "raise"}, {"on_runtime_error": {"action": "raise"}}),
    ],
)
def test_a_word_stands_for_a_table(word: dict, table: dict) -> None:
    """And is equal to it, as long as the table says nothing else."""
    ((field, value),) = word.items()
    assert Policy(**word) == Policy(**table)
    assert getattr(Policy(**table), field) == value
    assert getattr(Policy(**table), field) != getattr(Policy(), field)


def test_a_table_with_more_in_it_is_not_its_word() -> None:
    """Nor one whose first key is another."""
    assert Policy(select={"by": "fastest", "seconds": 3}).select != "fastest"
    assert Policy(select={"seconds": 3}).select != "first"
    assert Policy().select != "fastest"
    assert Policy().select != "speed"


def test_a_layer_changes_the_keys_of_a_table_that_it_gives() -> None:
    """The others stay as the layer below has them."""
    with composer.using(select={"by": "fastest", "seconds": 3}, verify={"rtol": 0.1}):
        policy = resolve(options={"select": {"background": True}, "verify": "compile"})
    assert policy.select.model_dump(exclude_defaults=True) == {
        "by": "fastest",
        "seconds": 3,
        "background": True,
    }
    assert (policy.verify.when, policy.verify.rtol) == ("compile", 0.1)


@pytest.mark.parametrize("options", [["chain"], "onnxrt", [], 3])
def test_options_that_are_no_mapping_are_refused(options) -> None:
    """With what they are, and what is accepted."""
    with pytest.raises(OptionError, match="a mapping of fields of composer") as told:
        resolve(options=options)
    assert str(told.value).endswith(repr(options))


def test_policy_as_options_sets_what_was_set() -> None:
    """Its defaults are behind what else was asked for."""
    with composer.using(min_coverage=0.25, verify="compile"):
        policy = resolve(options=Policy(chain=["eager"], verify="off"))
    assert [each.name for each in policy.chain] == ["eager"]
    assert (policy.min_coverage, policy.verify) == (0.25, "off")


def test_all_mistakes_are_named_at_once() -> None:
    """One error for three slips."""
    with pytest.raises(OptionError, match=r"chian.*strikt.*max-autotun"):
        resolve("max-autotun", {"chian": [], "strikt": True})


def test_modes_are_torchs_words() -> None:
    """Every mode of ``torch.compile`` that a backend may get; one of them asks for the fastest."""
    for mode in ("default", "reduce-overhead", "max-autotune-no-cudagraphs"):
        assert resolve(mode) == Policy()
    fastest = Policy(chain="auto", select="fastest", verify="compile")
    assert resolve("max-autotune") == fastest
    assert resolve("max-autotune", {"select": "first"}).select == "first"


def test_a_mistake_reaches_the_user_through_torch_compile() -> None:
    """Dynamo wraps it; it is never a reason to fall back."""
    with pytest.raises(BackendCompilerFailed, match="did you mean 'chain'") as caught:
        compiled(torch.sin, chian=["eager"])(torch.ones(2))
    assert isinstance(caught.value.inner_exception, OptionError)


def test_unknown_mode_reaches_the_user() -> None:
    """A misspelt mode is named as well."""
    with pytest.raises(BackendCompilerFailed, match="did you mean 'max-autotune'"):
        torch.compile(torch.sin, backend="composer", mode="max-autotun")(torch.ones(2))


@pytest.mark.parametrize("mode", torch._inductor.list_mode_options())
def test_every_mode_of_the_installed_torch_is_known(mode: str) -> None:
    """``lite``, say, from torch 2.13 on."""
    gm = torch.fx.symbolic_trace(lambda x: (x.sin(),))
    compose(gm, [torch.ones(2)], mode=mode, options={"chain": ["eager"]})
    assert last().policy[0] == ("mode" if mode == "max-autotune" else "options")
    assert isinstance(_torch.inductor.inductor_config(mode, {}), dict)


def test_name_of_the_region_is_the_models_name() -> None:
    """Torch 2.15 hands ``torch.compile(name=...)`` to the backend; ``options`` go before."""
    gm, x = torch.fx.symbolic_trace(lambda x: (x.sin(),)), torch.ones(2)
    compose(gm, [x], name="encoder", options={"chain": ["eager"]})
    assert last().model == "encoder"
    compose(gm, [x], name="encoder", options={"chain": ["eager"], "model": "mine"})
    assert last().model == "mine"


@pytest.mark.skipif("name" not in signature(torch.compile).parameters, reason="torch has none")
@pytest.mark.parametrize("backend", ["composer", "onnxrt", "composer_openvino"])
def test_name_is_taken_by_every_backend(backend: str) -> None:
    """``torch.compile(name=...)``, by which torch labels a region."""
    with torch.no_grad():
        named = torch.compile(torch.sin, backend=backend, name="encoder")
        torch.testing.assert_close(named(torch.ones(2)), torch.ones(2).sin())


def test_policy_is_frozen() -> None:
    """A policy does not change under a compiled graph."""
    with pytest.raises(ValueError, match="frozen"):
        Policy().strict = True


def test_freeze_is_part_of_the_key_where_it_is_said() -> None:
    """It decides what is compiled; keys of policies without it stay as they were."""
    keys = {Policy(freeze=wish).key for wish in ("auto", True, False)}
    assert len(keys) == 3
    assert Policy(freeze="auto").key == Policy().key
    assert "freeze" not in Policy().key
