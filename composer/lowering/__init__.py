"""From a captured graph to what engines read: AOTAutograd's functional graph, one ONNX model.

In the order in which a graph goes through them:

- :mod:`~composer.lowering.aot` has AOTAutograd make functional graphs; in these
  :mod:`~composer.lowering.operators` writes out what ONNX does not say as eager does;
- :mod:`~composer.lowering.partition.by_trial` and :mod:`~composer.lowering.partition.regions` part
  a graph into what an engine takes and what stays torch's (``constants``, ``views``, ``origins``);
  :mod:`~composer.lowering.partition.unsupported` knows which calls must not be translated;
- :mod:`~composer.lowering.export.onnx` makes a model of a region, by the exporter's translations
  and by composer's own (:mod:`~composer.lowering.export.vocabulary` knows all of them);
  ``linears``, ``repeats`` and ``reshapes`` prepare the region for that, and
  :mod:`~composer.lowering.export.plain` simplifies the model;
- :mod:`~composer.lowering.weights.bindings` has an engine take weights in, by address, and make
  itself anew when one changes (``weights``, ``statistics``, ``narrow_weights``; ``freeze`` is the
  policy's);
- :mod:`~composer.lowering.trial` runs once what was built.

A model is made once a graph (:class:`composer.build.Artefacts`) and kept for other processes
(:mod:`~composer.lowering.export.artefacts`), which :mod:`~composer.lowering.export.whole` may spare
AOTAutograd as well. :mod:`~composer.lowering.each` is for backends that know nothing of all this.
"""
