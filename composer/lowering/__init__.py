"""Lowers a captured graph to what engines read: functional graphs, and ONNX models of their parts.

A graph goes through the modules in this order:

- :mod:`~composer.lowering.aot` has AOTAutograd make functional graphs. The entries of
  :mod:`~composer.lowering.operators` decompose operators that ONNX does not compute as eager does.
- :mod:`~composer.lowering.partition.by_trial` and :mod:`~composer.lowering.partition.regions` cut a
  graph into regions for an engine and calls for torch, with ``constants``, ``views`` and
  ``origins``. :mod:`~composer.lowering.partition.unsupported` finds calls that must not be
  translated.
- :mod:`~composer.lowering.export.onnx` makes a model of a region, with the exporter's translations
  and composer's own (:mod:`~composer.lowering.export.vocabulary` lists both). ``linears``,
  ``repeats`` and ``reshapes`` prepare the region, and :mod:`~composer.lowering.export.plain`
  simplifies the model.
- :mod:`~composer.lowering.weights.bindings` has an engine take weights in by address, and build
  itself again when a weight changes. The policy's ``freeze`` decides if weights are taken in.
- :mod:`~composer.lowering.trial` runs the compiled graph once.

A model is made once for each graph (:class:`composer.build.Artefacts`) and kept on disk for other
processes (:mod:`~composer.lowering.export.artefacts`). With
:mod:`~composer.lowering.export.whole` another process can also skip AOTAutograd.
:mod:`~composer.lowering.each` is for backends that use none of these modules.
"""
