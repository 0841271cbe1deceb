"""`python -m paged_schema`: audit a model, fit a model configuration, list the rules, export the JSON Schema.

Exit status: 0 nothing to complain about, 1 something is refused or does not fit, 2 the question is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paged_schema.check import ORT_VERSIONS, PROVIDERS, target_of
from paged_schema.errors import PagedSchemaError
from paged_schema.rules.registry import ALL, STAGES, Rule


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except PagedSchemaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"error: {error.name} is missing: install paged-schema[onnx]", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader has gone; keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="paged_schema", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    audit = commands.add_parser("audit", help="judge every PagedAttention node of an ONNX file")
    audit.add_argument("model", type=Path, metavar="MODEL.onnx")
    _target_options(audit)
    audit.add_argument(
        "--bind", action="append", default=[], metavar="NAME=SIZE", help="give a symbol a size"
    )
    form = audit.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--sarif", action="store_true", help="print a SARIF 2.1.0 log")
    audit.set_defaults(run=_audit)

    place = commands.add_parser("applicability", help="fit a Hugging Face configuration to the operator")
    place.add_argument("config", type=Path, metavar="CONFIG.json")
    place.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the heads"
    )
    place.add_argument("--block-size", type=int, default=64, metavar="N")
    place.add_argument("--sink", action="store_true", help="the layers have learned sinks")
    place.add_argument("--qk-norm", action="store_true", help="query and key heads are normalised")
    place.add_argument("--dense", action="store_true", help="attend to every key although the model selects")
    place.add_argument("--dtype", default=None, metavar="TYPE", help="float16 or bfloat16")
    place.add_argument("--json", action="store_true", help="print JSON")
    _target_options(place)
    place.set_defaults(run=_applicability)

    listing = commands.add_parser("rules", help="list the rules in ORT's order")
    listing.add_argument("--ort", choices=ORT_VERSIONS)
    form = listing.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument(
        "--markdown", action="store_true", help="print a MyST page with an anchor for each rule"
    )
    listing.set_defaults(run=_rules)

    schema = commands.add_parser("schema", help="print the JSON Schema of the attributes and inputs")
    schema.set_defaults(run=_schema)
    return parser


def _target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ort", default="1.31", metavar="VERSION", help=f"one of {', '.join(ORT_VERSIONS)}")
    parser.add_argument("--provider", default="cuda", choices=PROVIDERS)
    parser.add_argument("--sm", type=int, default=80, metavar="NN", help="compute capability, such as 90")


def _audit(options: argparse.Namespace) -> int:
    target_of(options.ort, options.provider, (), options.sm)
    from paged_schema import report
    from paged_schema.audit import Settings, audit

    settings = Settings(options.ort, options.provider, options.sm, _bindings(options.bind))
    findings = audit(options.model, settings)
    if options.sarif:
        print(report.as_sarif(findings, options.model))
    elif options.json:
        print(report.as_json(findings, options.model))
    else:
        print(report.as_table(findings))
    return int(any(finding.verdict != "valid" for finding in findings))


def _bindings(given: Sequence[str]) -> dict[str, int]:
    bound = {}
    for text in given:
        name, _, size = text.rpartition("=")
        if not name or not (size.isascii() and size.isdecimal()) or len(size) > 18:
            raise PagedSchemaError(
                "load", "A05", "--bind", text, "NAME=SIZE with a size of 0 or above", "FAIL"
            )
        bound[name] = int(size)
    return bound


def _applicability(options: argparse.Namespace) -> int:
    from paged_schema import applicability

    target_of(options.ort, options.provider, (), options.sm)
    plan = applicability.Plan(
        tensor_parallel=options.tensor_parallel,
        block_size=options.block_size,
        dtype=options.dtype,
        ort=options.ort,
        sm=options.sm,
        sink=options.sink,
        qk_norm=options.qk_norm,
        dense=options.dense,
    )
    fit = applicability.fit_file(options.config, plan)
    print(applicability.as_json(fit) if options.json else applicability.as_table(fit))
    return int(not fit.fits)


def _rules(options: argparse.Namespace) -> int:
    from paged_schema.report import table
    from paged_schema.rules import all_rules

    minor = int(options.ort.partition(".")[2]) if options.ort else None
    rules = [rule for rule in all_rules() if minor is None or rule.since <= minor <= rule.until]
    if options.json:
        fields = ("id", "stage", "statement", "status", "versions", "anchor")
        print(json.dumps([{name: getattr(rule, name) for name in fields} for rule in rules], indent=2))
    elif options.markdown:
        print(markdown(rules))
    else:
        rows = [[rule.id, rule.stage, rule.versions, rule.status, rule.statement] for rule in rules]
        print(table(rows, ["rule", "stage", "versions", "status", "what must hold"]))
    return 0


def markdown(rules: Sequence[Rule]) -> str:
    """Return the rules as a MyST page, in ORT's order, with the anchor that each rule names."""
    parts = []
    for stage in STAGES:
        parts.append(f"## {stage}")
        for rule in rules:
            if rule.stage == stage:
                where = "" if rule.providers == ALL else f"; {', '.join(sorted(rule.providers))}"
                facts = f"ORT {rule.versions}; {rule.status}{where}"
                parts.append(f"({rule.anchor})=\n\n**{rule.id}**: {rule.statement}. ({facts})")
    return "\n\n".join(parts)


def _schema(options: argparse.Namespace) -> int:
    from paged_schema.attributes import PagedAttentionAttributes
    from paged_schema.inputs import PagedAttentionInputs

    found = {
        "attributes": PagedAttentionAttributes.model_json_schema(),
        "inputs": PagedAttentionInputs.model_json_schema(),
    }
    print(json.dumps(found, indent=2))
    return 0
