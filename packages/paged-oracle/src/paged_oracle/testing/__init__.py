"""What tests of this and other packages share: golden files, and synthetic calls of any shape."""

from paged_oracle.testing.cases import Case, make_case
from paged_oracle.testing.golden import Golden, load_golden
from paged_oracle.testing.transform import alone, pieces, place, repaged

__all__ = ["Case", "Golden", "alone", "load_golden", "make_case", "pieces", "place", "repaged"]
