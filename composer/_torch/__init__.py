"""The only package that uses torch's private modules and functions; each module has one subject.

``names`` says what composer uses each private name for, and what is off where torch lacks it.
``tests/_torch/test_torch.py`` has a test for each, so that after a torch upgrade a test fails with
the name of what moved. Heavy parts (the ONNX exporter) are imported when they are first used.

- ``dynamo``: The compile that Dynamo runs now, and Dynamo's registry of backends.
- ``breaks``: What the user compiled, and where Dynamo could not follow.
- ``minifier``: Torch's minifier.
- ``ranks``: The other ranks of ``torch.distributed``.
- ``modes``: Modes, and what autograd saves: grad mode, autocast, hooks.
- ``operators``: Operators and their schemas: names, paths, writes in place, random numbers.
- ``randomness``: Random numbers: generators, and whether a graph draws.
- ``symbols``: Sizes that are symbols.
- ``tensors``: Tensors and their memory.
- ``fakes``: Fake tensors.
- ``sources``: Copies of a graph, and what Dynamo says of its inputs.
- ``files``: Graphs that are written to files and read back.
- ``compiles``: Compiles that Dynamo does not run: after its own compile, beside it, or within
  another.
- ``canonical``: What passes need of torch: canonical ATen, and Inductor's pattern matcher.
- ``aot``: AOTAutograd: its settings, a compile through it, and what it found out about a graph.
- ``backwards``: Compiled backwards, and the guard around them.
- ``inductor``: Inductor: its settings, caches and kinds of pass.
- ``exporter``: The ONNX exporter.
- ``processor``: The processor.
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
    inductor,
    minifier,
    modes,
    names,
    operators,
    processor,
    randomness,
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
    "inductor",
    "minifier",
    "modes",
    "names",
    "operators",
    "processor",
    "randomness",
    "ranks",
    "sources",
    "symbols",
    "tensors",
]
