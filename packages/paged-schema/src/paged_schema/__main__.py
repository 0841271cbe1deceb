"""`python -m paged_schema`."""

import sys

from paged_schema.cli import main

sys.exit(main())
