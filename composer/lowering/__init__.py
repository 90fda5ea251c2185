"""From a captured graph to what engines read: AOTAutograd's functional graph, one ONNX model."""
