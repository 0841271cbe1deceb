"""The child process: load each model that arrives on standard input, answer what ONNX Runtime says.

It runs in a throw-away environment and imports nothing of ours. A message is four bytes of length, then the
bytes; an answer is the exception's name, a newline and its text.
"""

import struct
import sys


def main() -> None:
    """Serve until standard input ends."""
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]

    onnxruntime.set_default_logger_severity(4)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    while head := sys.stdin.buffer.read(4):
        model = sys.stdin.buffer.read(struct.unpack("<I", head)[0])
        try:
            onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
            answer = "Loaded\n"
        except Exception as error:
            answer = f"{type(error).__name__}\n{error}"
        encoded = answer.encode("utf-8", errors="replace")
        sys.stdout.buffer.write(struct.pack("<I", len(encoded)) + encoded)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
