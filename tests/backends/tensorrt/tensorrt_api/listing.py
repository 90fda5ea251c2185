"""Lists what a release of TensorRT offers of the classes that composer works with.

The bindings are small wheels of their own and import with do-nothing libraries in the place of
TensorRT's::

    pip download --no-deps tensorrt-cu13-bindings==11.4.0.106   # and unpack the wheel
    nm -D --undefined-only tensorrt_bindings/tensorrt.so | awk '/ U (get|create|init)[A-Z]/
        {print "void " $2 "(void) {}"}' > nothing.c
    for name in nvinfer nvinfer_plugin nvonnxparser; do
        gcc -shared -fPIC nothing.c -o lib$name.so.11 -Wl,-soname,lib$name.so.11
    done
    LD_LIBRARY_PATH=. python listing.py tensorrt_bindings > tensorrt-11.4.0.106.txt

(``.so.10`` for releases 10.x.) A line is a member of an enumeration or a class: with its
signatures if it is a method, with ``= property`` if it is none. ``test_tensorrt_api.py`` reads the
lists.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from typing import Any

CLASSES = (
    *("Builder", "IBuilderConfig", "INetworkDefinition", "ITensor", "IOptimizationProfile"),
    *("OnnxParser", "ParserError", "OnnxParserRefitter", "Refitter", "IHostMemory"),
    *("ITimingCache", "Runtime", "ICudaEngine", "IExecutionContext", "ILogger"),
    *("IProgressMonitor", "IOutputAllocator", "ISerializationConfig"),
)
ENUMERATIONS = (
    *("BuilderFlag", "ComputeCapability", "DataType", "MemoryPoolType"),
    *("NetworkDefinitionCreationFlag", "SerializationFlag", "TensorIOMode", "TensorLocation"),
)


_MODULES = re.compile(r"\b(?:tensorrt\w*\.)+")


def lines(module: Any) -> Iterator[str]:
    """The members of each class and enumeration that the module has, sorted within each."""
    for name in ENUMERATIONS:
        for member in sorted(getattr(getattr(module, name, None), "__members__", ())):
            yield f"{name}.{member} = member"
    for name in CLASSES:
        kind = getattr(module, name, None)
        for member in sorted(vars(kind)) if kind else ():
            if member == "__init__" or not member.startswith("_"):
                yield f"{name}.{member} {_described(vars(kind)[member])}"


def _described(member: Any) -> str:
    if not callable(member):
        return "= property"
    text = (member.__doc__ or "").splitlines()
    signatures = [line.strip() for line in text if "(self" in line and "->" in line]
    return _MODULES.sub("", " | ".join(line[line.index("(") :] for line in signatures)) or "(...)"


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(importlib.import_module(sys.argv[1]))) + "\n")
