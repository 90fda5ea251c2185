"""The only package that uses torch's private modules and functions; each module has one subject.

``names`` says what composer uses each private name for, and what is off where torch lacks it.
``tests/_torch/test_torch.py`` has a test for each, so that after a torch upgrade a test fails with
the name of what moved. Heavy parts (the ONNX exporter) are imported when they are first used.

Composer replaces the following functions and values of torch. Where nothing else is said, it does
so during its own compiles only. After each is the reason, and what torch would have to offer so
that the replacement could go.

- ``breaks``: ``ConvertFrameAssert.__call__``, ``CatchErrorsWrapper.__call__`` and
  ``InstructionTranslatorBase.log_graph_break``, for good. Dynamo only logs graph breaks and frames
  without a graph. *Callbacks for both.*
- ``backwards``: ``AOTDispatchAutograd.post_compile``, for good. A compiled backward that fails
  cannot fall back. *A hook that is given each compiled backward, also those from the cache.*
- ``aot``: ``partitioners.choose_saved_values_set``. The partitioner draws random numbers again.
  *A mark* ``MUST_SAVE`` *that holds with any memory budget* (pytorch/pytorch#190758).
- ``aot``: ``compile_utils.rand_ops``. The partitioner merges equal calls that draw. *Mended in
  torch 2.14.*
- ``compiles``: the code of ``fx._symbolic_trace.is_fx_symbolic_tracing``. While one thread traces,
  compiled functions refuse to run in all threads. *A flag for each thread*
  (pytorch/pytorch#168999).

- ``inductor``: ``freezing.freeze``. Frozen graphs give out their own constants. *Copies.*
- ``inductor``: ``async_compile.maybe_warm_pool``. Inductor starts processes that a graph on a CPU
  does not use. *A start at the first graph on a GPU.*
- ``tensors``: the module ``weakref`` within ``torch.utils``, for good. ``swap_tensors`` refuses
  tensors with weak references. *A hook before a swap.*
- ``minifier``: ``after_dynamo.generate_dynamo_fx_repro_string``, for good, and ``extra_imports``.
  A script of the minifier does not set the options of the backend. *A hook for more lines.*
- ``exporter``: ``OpSignature.from_op_schema`` of onnx_ir. The exporter reads the schema of an
  operator again for each node. *A cache.*
"""

from composer._torch.names import require_essential

require_essential()

from composer._torch import (  # noqa: E402  # what they import is there
    aot,
    backwards,
    breaks,
    canonical,
    compiles,
    dynamo,
    exporter,
    fakes,
    files,
    floats,
    inductor,
    minifier,
    modes,
    names,
    operators,
    processor,
    ranks,
    sources,
    symbols,
    tensors,
)

__all__ = [
    "aot",
    "backwards",
    "breaks",
    "canonical",
    "compiles",
    "dynamo",
    "exporter",
    "fakes",
    "files",
    "floats",
    "inductor",
    "minifier",
    "modes",
    "names",
    "operators",
    "processor",
    "ranks",
    "sources",
    "symbols",
    "tensors",
]
