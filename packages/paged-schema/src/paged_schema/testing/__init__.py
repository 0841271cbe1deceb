"""What the test suites share: a generator of nodes, and the real ONNX Runtime behind a pipe."""
