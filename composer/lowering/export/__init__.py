"""Translates regions of functional graphs to ONNX models, made once and kept on disk."""
