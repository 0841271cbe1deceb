"""A NumPy reference that computes exactly what ONNX Runtime's PagedAttention computes.

Invariant: no value leaves this package that was not computed by the documented formula; what cannot be
computed is an error, and an error leaves the caches as they were.
"""

from paged_oracle import latent, tolerance
from paged_oracle.attention import Outputs, paged_attention
from paged_oracle.backends import BackendName
from paged_oracle.compare import Comparison, Coordinate, compare
from paged_oracle.errors import OracleError, UndefinedInputError, UnusableArrayError, UnusableOptionError
from paged_oracle.prologue import Rounding

__all__ = [
    "BackendName",
    "Comparison",
    "Coordinate",
    "OracleError",
    "Outputs",
    "Rounding",
    "UndefinedInputError",
    "UnusableArrayError",
    "UnusableOptionError",
    "compare",
    "latent",
    "paged_attention",
    "tolerance",
]
