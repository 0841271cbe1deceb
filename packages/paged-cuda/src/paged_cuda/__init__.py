"""CUDA kernels for ONNX Runtime's PagedAttention, compiled by NVRTC without a toolkit."""
