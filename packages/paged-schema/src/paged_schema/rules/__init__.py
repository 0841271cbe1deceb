"""The contract as an ordered list of rules: load, then build, run and select.

Importing the modules in this order is what puts the rules in order.
"""

# isort: off
from paged_schema.rules import verify as verify
from paged_schema.rules import inference as inference
from paged_schema.rules import build as build
from paged_schema.rules import rows as rows
from paged_schema.rules import values as values
from paged_schema.rules import caches as caches
from paged_schema.rules import sequences as sequences
from paged_schema.rules import rotary as rotary
from paged_schema.rules import quantisation as quantisation
from paged_schema.rules import select as select

# isort: on
from paged_schema.rules.registry import Fault, Rule, Step, all_rules, steps, steps_for

__all__ = ["Fault", "Rule", "Step", "all_rules", "steps", "steps_for"]
