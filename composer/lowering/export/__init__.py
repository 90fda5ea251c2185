"""One region of a functional graph as one ONNX model, made once and kept on disk."""
