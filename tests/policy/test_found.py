"""What policy files that were only found may not say."""

from __future__ import annotations

import pytest
from policies import GRAPH, run, write
from torch._dynamo.exc import BackendCompilerFailed

import composer
from composer.chain.candidates import ONLY_TABLES
from composer.policy.resolution import resolve


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


@pytest.mark.parametrize("text", ["[defaults]\n", '[[models]]\nmatch = { device = "cpu" }\n'])
def test_a_file_found_here_does_not_say_where_graphs_are_written(text: str) -> None:
    """The folder could be anywhere; a file that the user pointed at may say it."""
    path = write(f'{text}repro = "elsewhere"\n')
    with pytest.raises(BackendCompilerFailed, match="may not say where folders of graphs"):
        run()
    assert resolve(GRAPH, ONLY_TABLES, configured=path).policy


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
