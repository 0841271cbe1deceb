"""The contract of ONNX Runtime's com.microsoft::PagedAttention as typed models, rules and an audit."""
