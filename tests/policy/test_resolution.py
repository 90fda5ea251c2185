"""Where policies come from, which of them hold for a graph, and who has the last word."""

from __future__ import annotations

import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
from common import ROOT, compiled, last
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer.chain.candidates import ONLY_TABLES
from composer.errors import FallbackWarning, OptionError, UnknownNameError
from composer.policy import Facts
from composer.policy.resolution import resolve
from composer.policy.sources import read
from composer.session import current
from composer.telemetry.notices import VARIABLES

GRAPH = Facts("Net", "cpu", "float32", training=False, dynamic=False)


class Encoder(torch.nn.Module):
    def forward(self, x):
        return torch.cos(x)


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    """No file and no switch of the machine's."""
    monkeypatch.chdir(tmp_path)
    for name in ("CONFIG", "CHAIN", "STRICT", "DISABLE"):
        monkeypatch.delenv(f"COMPOSER_{name}", raising=False)
    yield
    composer.configure(None)


def write(text: str, name: str = "composer.toml") -> Path:
    path = Path(name)
    path.write_text(text)
    return path.absolute()


def run(module=None, **options):
    x = torch.ones(2)
    compiled(module or Encoder(), **options)(x)
    return last()


EAGER = '[defaults]\nchain = ["eager"]\n'


def test_a_file_in_the_working_directory_holds() -> None:
    """``composer.toml`` before ``pyproject.toml``."""
    write('[tool.composer.defaults]\nchain = ["aot_eager"]\n', "pyproject.toml")
    assert (run().chosen, last().policy) == ("aot_eager", ("defaults",))
    write(EAGER)
    torch.compiler.reset()
    assert run().chosen == "eager"


def test_a_pyproject_of_somebody_elses_is_no_policy() -> None:
    """Without a table of ours it says nothing."""
    write('[project]\nname = "else"\n', "pyproject.toml")
    assert run(chain=["eager"]).policy == ("options",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tool]\ncomposer = "on"\n', "is one table, not 'on'"),
        ("[tool]\ncomposer = true\n", "is one table, not True"),
        ("[[tool.composer]]\na = 1\nb = 2\n", "is one table, not "),
        ("tool = 3\n", r"has no table \[tool.composer\]"),
        ('[project]\nname = "else"\n', r"has no table \[tool.composer\]"),
    ],
)
def test_a_pyproject_without_a_table_of_ours_is_no_policy_file(text: str, said: str) -> None:
    """Whoever names it is told."""
    file = write(text, "pyproject.toml")
    with pytest.raises(OptionError, match=rf"pyproject.toml.* {said}"):
        read(file)


def test_a_configured_source_goes_before_files_found_here(monkeypatch) -> None:
    """And the file named by the environment before that."""
    write(EAGER)
    composer.configure({"defaults": {"chain": ["aot_eager"]}})
    assert run().chosen == "aot_eager"
    named = write('[defaults]\nchain = ["eager"]\nmodel = "named"\n', "other.toml")
    monkeypatch.setenv("COMPOSER_CONFIG", str(named))
    torch.compiler.reset()
    assert (run().chosen, last().model) == ("eager", "named")


@pytest.mark.parametrize("kind", ["path", "mapping", "book", "policy"])
def test_configure_takes_four_kinds_of_source(kind: str) -> None:
    """A file's path, a mapping shaped like it, a book, a policy for all."""
    table = {"defaults": {"chain": ["aot_eager"]}}
    composer.configure(
        {
            "path": write('[defaults]\nchain = ["aot_eager"]\n', "mine.toml"),
            "mapping": table,
            "book": composer.PolicyBook(**table),
            "policy": composer.Policy(chain=["aot_eager"]),
        }[kind]
    )
    assert (run().chosen, last().policy) == ("aot_eager", ("defaults",))


@pytest.mark.parametrize("kind", ["mapping", "book", "policy"])
def test_what_was_configured_is_not_changed_with_the_object_that_was_given(kind: str) -> None:
    """Whatever the object is, and however deep in it the change is."""
    options = {"session_config": {"a": "1"}}
    table = {"defaults": {"chain": [{"backend": "onnxrt", "options": options}]}}
    source = {
        "mapping": table,
        "book": composer.PolicyBook(**table),
        "policy": composer.Policy(**table["defaults"]),
    }[kind]
    composer.configure(source)
    options["session_config"]["a"] = "2"
    table["defaults"]["chain"].append("eager")
    if kind != "mapping":
        policy = source if kind == "policy" else source.defaults
        policy.chain[0].options["more"] = 3
    (candidate,) = resolve(GRAPH, ONLY_TABLES, configured=current().configured).policy.chain
    assert candidate.options == {"session_config": {"a": "1"}}


def test_policy_in_force_is_not_changed_with_the_object_that_was_given() -> None:
    """A graph keeps its policy for the candidates that it may need later."""
    options = {"session": {"threads": 1}}
    chain = [{"backend": "onnxrt", "options": options}]
    by_options = resolve(GRAPH, ONLY_TABLES, options={"chain": chain})
    with composer.using({"defaults": {"chain": chain}}):
        options["session"]["threads"] = 2
        by_context = resolve(GRAPH, ONLY_TABLES)
    for rules in (by_options, by_context):
        assert rules.policy.chain[0].options == {"session": {"threads": 1}}


def test_a_changed_file_is_read_again() -> None:
    """By the next compile."""
    path = write(EAGER)
    composer.configure(path)
    assert run().chosen == "eager"
    path.write_text('[defaults]\nchain = ["aot_eager"]\n')
    torch.compiler.reset()
    assert run().chosen == "aot_eager"


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


def free_function(x):
    return torch.sin(x)


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("version = 2\n", "version"),
        ("version = true\n", "'version' is True: the version of the format is the whole number 1"),
        ("version = 1.0\n", "'version' is 1.0: the version of the format is the whole number 1"),
        ("[defaults\n", "cannot be read"),
        ('[defaults]\nchian = ["eager"]\n', "'defaults.chian'; did you mean 'chain'?"),
        (
            '[[models]]\nmatch = { modle = "x" }\n',
            r"models\[0\].match.modle'; did you mean 'model'?",
        ),
        ("[modles]\n", "'modles'; did you mean 'models'?"),
        ('chain = ["eager"]\n', "'chain' is an option of the table 'defaults'"),
        ("[defaults]\nstrict = 'perhaps'\nmin_coverage = 3\n", "strict.*min_coverage"),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(text: str, said: str) -> None:
    """File, table, key, what is nearest: at once, or at the first compile where it is found."""
    with pytest.raises(OptionError, match=said.replace("?", r"\?")) as told:
        composer.configure(write(text, "mine.toml"))
    assert "mine.toml" in str(told.value)
    write(text)
    with pytest.raises(BackendCompilerFailed, match=said.replace("?", r"\?")) as caught:
        run()
    assert isinstance(caught.value.inner_exception, OptionError)
    assert "composer.toml" in str(caught.value.inner_exception)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({"defaults": {"chian": []}}, "unknown option 'defaults.chian'; did you mean 'chain'?"),
        ({"defaults": {"chain": ["onxrt"]}}, "defaults: unknown backend 'onxrt'; did you mean"),
        (
            {"models": [{"passes": ["fold_batchnorm"]}]},
            "models[0]: unknown pass 'fold_batchnorm'; did you mean 'fold_batch_norm'?",
        ),
        (
            {"backends": {"onnxrt": {"thread": 1}}},
            "backends.onnxrt: backend 'onnxrt': unknown option 'thread'; did you mean 'threads'?",
        ),
        ("not-here.toml", "not-here.toml' cannot be read: No such"),
        (composer.Policy(chain=["onxrt"]), "defaults: unknown backend 'onxrt'"),
    ],
)
def test_configure_raises_at_once_and_changes_nothing(source, said: str) -> None:
    """Keys, names of engines and passes, options of engines, a file that is missing."""
    composer.configure({"defaults": {"chain": ["aot_eager"]}})
    with pytest.raises((OptionError, UnknownNameError), match=re.escape(said)):
        composer.configure(source)
    assert run().chosen == "aot_eager"


def test_configure_imports_no_code() -> None:
    """What it names may be defined after the call, as in the module that makes it."""
    composer.configure({"defaults": {"chain": ["not_yet:engine"], "passes": ["not_yet:Pass"]}})
    with pytest.raises(BackendCompilerFailed, match="'not_yet:engine' cannot be imported"):
        run()


def test_a_file_may_begin_with_a_byte_order_mark() -> None:
    """As editors on Windows write it."""
    path = write("\ufeff[defaults]\nchain = ['eager']\n")
    assert resolve(GRAPH, ONLY_TABLES, configured=path).policy.chain[0].name == "eager"


def test_a_missing_file_is_an_error_that_names_it(monkeypatch) -> None:
    """Whoever pointed at it meant it."""
    monkeypatch.setenv("COMPOSER_CONFIG", "not-here.toml")
    with pytest.raises(BackendCompilerFailed, match=r"not-here.toml' cannot be read: No such"):
        run()


@pytest.mark.parametrize(
    "line",
    [
        'chain = ["stranger:backend"]',
        'chain = [{ backend = "stranger:backend" }]',
        'passes = ["stranger:Pass"]',
        'passes = [{ pass = "stranger:Pass" }]',
    ],
)
def test_a_file_found_here_imports_no_code(line: str) -> None:
    """Only one that the user pointed at may."""
    path = write(f"[defaults]\n{line}\n")
    with pytest.raises(BackendCompilerFailed, match="may not import code: stranger:"):
        run()
    composer.configure(path)
    with pytest.raises(BackendCompilerFailed, match="cannot be imported"):
        run()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[backends.inductor]\n"cpp.cxx" = ["./evil"]\n', "inductor cpp.cxx"),
        ('[backends.inductor]\n"cpp.cxx" = ["pip install evil"]\n', "inductor cpp.cxx"),
        ('[backends.inductor]\n"cuda.cutlass_dir" = "lies_here"\n', "inductor cuda.cutlass_dir"),
        ('[backends.inductor]\n"cpp.cxx" = ["a", "evil"]\n', "inductor cpp.cxx"),
        ('[backends.inductor]\n"cuda.cuda_cxx" = "evil"\n', "inductor cuda.cuda_cxx"),
        (
            '[backends.inductor]\n"cutlass.compile_opt_level" = "-Ievil"\n',
            "inductor cutlass.compile_opt_level",
        ),
        ('[backends.inductor]\n"rocm.rocm_home" = "evil"\n', "inductor rocm.rocm_home"),
        ('[backends.inductor]\n"trace.debug_dir" = "new"\n', "inductor trace.debug_dir"),
        ('[backends.onnxrt.session_config]\n"a_filepath" = "new"\n', "onnxrt session_config"),
        ('[backends.onnxrt.session_config]\n"some.file" = "/tmp/x"\n', "onnxrt session_config"),
        (
            '[defaults]\nchain = [{ backend = "mine", options = { path = "a/b" } }]\n',
            "mine path",
        ),
    ],
)
def test_a_file_found_here_names_no_program_and_no_file(text: str, named: str) -> None:
    """An engine may run or write what it is told of; a file that the user pointed at may tell."""
    path = write(text)
    path.with_name("lies_here").mkdir()
    with pytest.raises(BackendCompilerFailed, match=f"tell engines of programs and files: {named}"):
        run()
    assert resolve(GRAPH, ONLY_TABLES, configured=path).policy.chain


def test_a_file_found_here_says_what_engines_have_words_for() -> None:
    """Numbers, switches, and text that is a plain word."""
    write(
        '[defaults]\nchain = ["eager", { backend = "inductor", options = { freezing = true, '
        'max_autotune_gemm_backends = "ATEN,CPP" } }]\n'
        '[backends.onnxrt]\nthreads = 2\nproviders = ["CPUExecutionProvider"]\n'
        '[backends.onnxrt.session_config]\n"session.set_denormal_as_zero" = "1"\n'
    )
    assert run().chosen == "eager"


def test_a_table_without_a_pass_is_named_in_a_file_found_here() -> None:
    """As it is in any other."""
    write('[defaults]\npasses = [{ name = "fold_batch_norm" }]\n')
    with pytest.raises(BackendCompilerFailed, match="a table in passes names its pass"):
        run()


def test_switches_have_the_last_word(monkeypatch) -> None:
    """Chain, strictness, and composer as a whole."""
    monkeypatch.setenv("COMPOSER_STRICT", "on")
    with pytest.raises(BackendCompilerFailed, match="CandidateError"):
        run(chain=["tensorrt", "eager"])
    monkeypatch.setenv("COMPOSER_STRICT", "no")
    assert run(chain=["tensorrt", "aot_eager"]).chosen == "aot_eager"
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    torch.compiler.reset()
    assert (run(chain=["aot_eager"]).chosen, last().policy[-1]) == ("eager", "COMPOSER_DISABLE")
    assert "timing" not in run(select="fastest").attempts[0].engine


@pytest.mark.parametrize(
    ("options", "variables", "text"),
    [
        ({"chian": []}, {}, ""),
        ({"select": "speed"}, {}, ""),
        ({}, {"COMPOSER_STRICT": "maybe"}, ""),
        ({}, {"COMPOSER_CHAIN": "['a']"}, ""),
        ({}, {"COMPOSER_CONFIG": "not-here.toml"}, ""),
        ({}, {}, "[defaults\n"),
        ({}, {}, "[backends.onxrt]\nthreads = 1\n"),
        ({}, {}, "[defaults]\nlocked = true\nverify = 3\n"),
    ],
)
def test_disabling_works_whatever_is_malformed(monkeypatch, options, variables, text) -> None:
    """With one warning that says what, where that would have been read."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write(text)
    x = torch.ones(2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for module in (Encoder(), free_function):
            assert torch.equal(compiled(module, **options)(x), module(x))
    assert (last().chosen, last().policy[-1]) == ("eager", "COMPOSER_DISABLE")
    told = [str(each.message) for each in caught if each.category is FallbackWarning]
    (said,) = told
    assert said.startswith("COMPOSER_DISABLE is on, and a mistake is disregarded: ")


def test_disabling_disregards_the_slip_in_the_name_of_an_engines_table(monkeypatch) -> None:
    """The warning names it with its file."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    path = write("[backends.onxrt]\nthreads = 1\n")
    with pytest.warns(FallbackWarning, match=re.escape(f"disregarded: {path}: table 'backends'")):
        assert run().chosen == "eager"


def test_disabling_looks_up_no_engine_and_no_pass(monkeypatch) -> None:
    """None of them is to run."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    assert run(chain=["onxrt"], passes=["no_such:Pass"]).chosen == "eager"


@pytest.mark.parametrize("source", [3, "not-here.toml", {"defaults": {"chian": []}}])
def test_disabling_disregards_mistakes_in_the_program(monkeypatch, source) -> None:
    """Of ``configure``, ``using`` and ``mode``: one warning has them all, at the first compile."""
    monkeypatch.setenv("COMPOSER_DISABLE", "1")
    composer.configure(source)
    x = torch.ones(2)
    sine, cosine = (
        torch.compile(function, backend="composer", mode="max-autotun")
        for function in (torch.sin, torch.cos)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with composer.using(source), composer.using(strikt=1):
            assert torch.equal(sine(x), x.sin())
            assert torch.equal(cosine(x), x.cos())
    (said,) = (str(each.message) for each in caught if each.category is FallbackWarning)
    assert said.startswith("COMPOSER_DISABLE is on, and a mistake is disregarded: ")
    assert "unknown mode 'max-autotun'" in said
    assert "unknown option 'strikt'" in said
    assert last().chosen == "eager"


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch) -> None:
    """With the words it takes."""
    monkeypatch.setenv("COMPOSER_STRICT", "maybe")
    with pytest.raises(BackendCompilerFailed, match="COMPOSER_STRICT is 'maybe'"):
        run(chain=["eager"])


def test_a_misspelt_switch_is_warned_of(monkeypatch) -> None:
    """Once; and not another program's, whose prefix is the same."""
    monkeypatch.setenv("COMPOSER_DISABEL", "1")
    monkeypatch.setenv("COMPOSER_DISABLE_NETWORK", "1")
    with pytest.warns(FallbackWarning) as caught:
        assert run(chain=["aot_eager"]).chosen == "aot_eager"
    (said,) = caught
    assert "COMPOSER_DISABEL is set" in str(said.message)
    assert "mean COMPOSER_DISABLE?" in str(said.message)
    torch.compiler.reset()
    run(chain=["aot_eager"])


def test_all_variables_that_are_read_are_known() -> None:
    """So that none of them is taken for a slip, or left out of the page on them."""
    sources = Path(composer.__file__).parent.rglob("*.py")
    read_ = {name for each in sources for name in re.findall(r"COMPOSER_[A-Z_]+", each.read_text())}
    assert read_ - {"COMPOSER_"} == set(VARIABLES)
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    table = page.partition("## Environment variables")[2].partition("\n## ")[0]
    assert set(re.findall(r"COMPOSER_[A-Z_]+", table)) == set(VARIABLES)


def test_reset_keeps_the_configuration() -> None:
    """It forgets what happened, not what was asked for."""
    composer.configure({"defaults": {"chain": ["aot_eager"]}})
    composer.reset()
    assert run().chosen == "aot_eager"


def test_a_book_of_nothing_is_empty() -> None:
    """So are its layers."""
    assert read(None) == composer.PolicyBook()


@pytest.mark.parametrize("source", [3, ["eager"], b"composer.toml"])
def test_what_is_no_source_is_named(source) -> None:
    """At once."""
    with pytest.raises(OptionError, match="a policy is a PolicyBook"):
        composer.configure(source)
    with pytest.raises(OptionError, match="not "), composer.using(source):
        pass
