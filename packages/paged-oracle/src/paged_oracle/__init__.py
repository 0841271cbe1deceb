"""A NumPy reference that computes exactly what ONNX Runtime's PagedAttention computes."""
