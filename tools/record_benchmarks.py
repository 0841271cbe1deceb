"""Run pytest-benchmark files and keep what a record needs: machine, versions and samples, no names of hosts.

usage: python tools/record_benchmarks.py OUT.json BENCH.py ...
"""

import json
import platform
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("numpy", "pydantic", "ml-dtypes", "pytest-benchmark")


def main(out: Path, files: list[str]) -> None:
    """Run `files` and write the record to `out`."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.json"
        command = [
            "-m",
            "pytest",
            "-q",
            "-o",
            "python_files=bench_*.py",
            "-o",
            "python_functions=bench_* test_*",
            *files,
            f"--benchmark-json={raw}",
        ]
        subprocess.run([sys.executable, *command], check=True)
        found = json.loads(raw.read_text(encoding="utf-8"))
    cpu = found["machine_info"]["cpu"]
    record = {
        "format": 1,
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python tools/record_benchmarks.py OUT.json {' '.join(files)}",
        "cpu": cpu["brand_raw"],
        "cores": cpu["count"],
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
        "rows": [
            {
                "name": row["name"],
                "median_us": row["stats"]["median"] * 1e6,
                "iqr_us": row["stats"]["iqr"] * 1e6,
                "rounds": row["stats"]["rounds"],
                "iterations": row["stats"]["iterations"],
                "samples_us": [sample * 1e6 for sample in row["stats"]["data"][:200]],
            }
            for row in found["benchmarks"]
        ],
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for row in record["rows"]:
        print(f"{row['name']:60} {row['median_us']:12.1f} us")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
