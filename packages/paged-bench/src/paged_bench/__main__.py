"""`python -m paged_bench`."""

import sys

from paged_bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
