"""Which policies hold for a graph, and how their layers are merged."""

from __future__ import annotations

import re
import threading

import pytest
import torch
from common import last
from policies import GRAPH, free_function, run, write
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer.chain.candidates import ONLY_TABLES
from composer.errors import UnknownNameError
from composer.policy.resolution import resolve
from composer.session import current


@pytest.mark.parametrize(
    ("match", "holds"),
    [
        ({}, True),
        ({"model": "*.Encoder"}, True),
        ({"model": "*.Decoder"}, False),
        ({"device": "cpu", "dtype": "float*"}, True),
        ({"device": "cuda"}, False),
        ({"training": False, "dynamic": False}, True),
        ({"training": True}, False),
    ],
)
def test_a_rule_holds_for_the_graphs_it_matches(match, holds: bool) -> None:
    """Every key has to agree; one that is not given agrees with all."""
    rule = {"match": match, "chain": ["aot_eager"]}
    composer.configure({"defaults": {"chain": ["eager"]}, "models": [rule]})
    report = run()
    assert report.chosen == ("aot_eager" if holds else "eager")
    assert report.policy == (("defaults", "models[0]") if holds else ("defaults",))


def test_a_rule_matches_the_name_the_user_gave() -> None:
    """As well as the class; functions match by their qualified name."""
    rules = [
        {"match": {"model": "ranker"}, "chain": ["aot_eager"]},
        {"match": {"model": "*.free_function"}, "chain": ["aot_eager"]},
    ]
    composer.configure({"defaults": {"chain": ["eager"]}, "models": rules})
    assert run(model="ranker").policy == ("defaults", "models[0]", "options")
    assert run(free_function).policy == ("defaults", "models[1]")


class Layer(torch.nn.Module):
    def forward(self, x):
        x = torch.cos(x)
        torch._dynamo.graph_break()
        return torch.sin(x)


class Stack(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Layer()

    def forward(self, x):
        return self.layer(x * 2) + 1


def test_a_rule_for_the_model_holds_behind_a_graph_break_in_a_submodule() -> None:
    """Dynamo then traces the submodule's ``forward`` by itself; its own rule goes over."""
    rules = [
        {"match": {"model": "*.Stack"}, "chain": ["aot_eager"]},
        {"match": {"model": "*.Layer"}, "min_coverage": 0.1},
    ]
    composer.configure({"defaults": {"chain": ["eager"]}, "models": rules})
    run(Stack())
    spoke = {report.model.rpartition(".")[2]: report.policy for report in composer.reports()}
    assert spoke["Stack"] == ("defaults", "models[0]")
    assert spoke["Layer"] == ("defaults", "models[0]", "models[1]")
    assert {report.chosen for report in composer.reports()} == {"aot_eager"}


def test_a_rule_for_a_function_holds_behind_a_graph_break_in_a_module_that_it_calls() -> None:
    """As for a model's."""
    stack = Stack()

    def step(x):
        return stack(x) * 3

    composer.configure({"models": [{"match": {"model": "*.step"}, "chain": ["eager"]}]})
    run(step)
    assert {report.policy for report in composer.reports()} == {("models[0]",)}
    assert len(composer.reports()) > 2


def test_layers_speak_field_by_field_and_the_last_wins(monkeypatch) -> None:
    """Defaults, rules in the file's order, ``using``, options, the environment."""
    composer.configure(
        {
            "defaults": {"chain": ["eager"], "min_coverage": 0.1, "model": "defaults"},
            "models": [
                {"match": {"device": "cpu"}, "min_coverage": 0.2, "strict": True},
                {"match": {"dtype": "float32"}, "min_coverage": 0.3},
            ],
        }
    )
    monkeypatch.setenv("COMPOSER_CHAIN", "aot_eager, eager")
    with composer.using(model="using", on_exhausted="raise"):
        report = run(model="options", chain=["inductor"])
    assert report.policy == (
        *("defaults", "models[0]", "models[1]", "using", "options", "COMPOSER_CHAIN"),
    )
    assert (report.chosen, report.model) == ("aot_eager", "options")


def test_using_is_undone_on_leaving_and_belongs_to_its_thread() -> None:
    """Another thread compiles by its own policy."""
    seen = []
    with composer.using(chain=["eager"]):
        with composer.using({"defaults": {"chain": ["aot_eager"]}}):
            seen.append(run().chosen)
        torch.compiler.reset()
        seen.append(run().chosen)

        def elsewhere():
            with composer.using(chain=["aot_eager"]):
                seen.append(run(free_function).chosen)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seen == ["aot_eager", "eager", "aot_eager"]


def test_options_of_engines_stand_behind_a_candidates_own() -> None:
    """``[backends.onnxrt]`` is for every candidate of that name."""
    composer.configure(
        {"backends": {"onnxrt": {"threads": 1, "graph_optimization_level": "basic"}}}
    )
    with torch.no_grad():
        run(chain=[{"backend": "onnxrt", "options": {"threads": 2}}], strict=True)
        assert last().attempts[0].engine["threads"] == 2
        run(free_function, chain=["onnxrt"], strict=True)
    assert last().attempts[0].engine["threads"] == 1


def test_a_slip_in_the_name_of_an_engines_table_is_an_error() -> None:
    """As it is in a chain; a name that is like no other may be one of another machine's."""
    said = "backends.onxrt: unknown backend 'onxrt'; did you mean 'onnxrt'?"
    with pytest.raises(UnknownNameError, match=re.escape(said)):
        composer.configure({"backends": {"onxrt": {"threads": 1}, "far_away": {"cards": 2}}})


def test_rules_in_single_brackets_are_told_what_to_write() -> None:
    """TOML makes one table of them where a list of tables is meant."""
    write('[models]\nchain = ["eager"]\n')
    with pytest.raises(BackendCompilerFailed, match=re.escape("write [[models]], not [models]")):
        run()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[defaults]\nchain = ["onxrt"]\n', "defaults: unknown backend 'onxrt'"),
        ('[[models]]\npasses = ["fold_batchnorm"]\n', "models[0]: unknown pass 'fold_batchnorm'"),
        ('[[models]]\nchain = [{backend = "onnxrt", options = {thread = 1}}]\n', "models[0]: back"),
        ("[backends.onxrt]\nthreads = 1\n", "table 'backends': unknown backend 'onxrt'"),
    ],
)
def test_a_slip_in_a_file_is_named_with_the_file(text: str, said: str) -> None:
    """And with its rule: nobody who meets the error at a call knows which file was in force."""
    path = write(text)
    with pytest.raises(BackendCompilerFailed, match=re.escape(f"{path}: {said}")):
        run()


def test_slips_in_chain_passes_and_tables_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each of them has its own file or variable in front."""
    path = write('[defaults]\npasses = ["fold_batchnorm"]\n[backends.onxrt]\nthreads = 1\n')
    monkeypatch.setenv("COMPOSER_CHAIN", "inductr")
    with pytest.raises(BackendCompilerFailed) as caught:
        run()
    said = str(caught.value.inner_exception)
    assert "COMPOSER_CHAIN: unknown backend 'inductr'" in said
    assert f"{path}: defaults: unknown pass 'fold_batchnorm'" in said
    assert f"{path}: table 'backends': unknown backend 'onxrt'" in said


def test_a_slip_in_a_context_is_not_the_files() -> None:
    """Which has a table of that kind as well."""
    path = write("[backends.onnxrt]\nthreads = 1\n")
    with (
        composer.using({"backends": {"onxrt": {"threads": 2}}}),
        pytest.raises(BackendCompilerFailed, match="table 'backends': unknown") as caught,
    ):
        run()
    assert str(path) not in str(caught.value.inner_exception)


@pytest.mark.parametrize(
    ("chain", "said"),
    [
        ("onxrt", "COMPOSER_CHAIN: unknown backend 'onxrt'"),
        ('["onnxrt"]', r"COMPOSER_CHAIN is names .*, not '\[\"onnxrt\"\]'"),
    ],
)
def test_a_slip_in_a_switch_is_named_with_the_switch(
    monkeypatch: pytest.MonkeyPatch, chain: str, said: str
) -> None:
    """Whoever reads the error did not write the program."""
    monkeypatch.setenv("COMPOSER_CHAIN", chain)
    with pytest.raises(BackendCompilerFailed, match=said):
        run()


def test_options_of_engines_add_up_option_by_option() -> None:
    """A context that says one of them leaves the others of the file as they are."""
    composer.configure({"backends": {"onnxrt": {"graph_optimization_level": "basic"}}})
    with composer.using({"backends": {"onnxrt": {"threads": 1}}}):
        rules = resolve(
            GRAPH, ONLY_TABLES, options={"chain": ["onnxrt"]}, configured=current().configured
        )
    (candidate,) = rules.policy.chain
    assert candidate.options == {"graph_optimization_level": "basic", "threads": 1}


def test_when_matches_the_class_of_a_model_that_the_user_named() -> None:
    """As ``match`` does: its keys mean the same."""
    for glob in ("*.Encoder", "ranker"):
        torch.compiler.reset()
        chain = [{"backend": "aot_eager", "when": {"model": glob}}]
        assert run(chain=chain, model="ranker").chosen == "aot_eager"


def test_when_skips_a_candidate() -> None:
    """With the reason ``policy``, no warning, and no error under ``strict``."""
    chain = [{"backend": "inductor", "when": {"device": "cuda"}}, "aot_eager"]
    report = run(chain=chain, strict=True)
    skipped = report.attempts[0]
    assert (skipped.status, skipped.reason) == ("skipped", "policy")
    assert skipped.message == "the policy wants it only when device = 'cuda'"
    assert report.chosen == "aot_eager"


def test_a_chain_of_skipped_candidates_is_exhausted() -> None:
    """Where the policy asks for an error there is one."""
    chain = [{"backend": "inductor", "when": {"training": True}}]
    with pytest.raises(BackendCompilerFailed, match="no candidate was accepted"):
        run(chain=chain, on_exhausted="raise")
