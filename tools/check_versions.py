"""Check that the members move as one release: equal versions, and siblings required at exactly that version.

uv does not compare a requirement on a workspace member with the member's version, so a stale pin would lock,
install and pass every test here, and fail only for a user. Usage: `python tools/check_versions.py [ROOT]`.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import TypeAlias

Project: TypeAlias = dict[str, object]


def read_projects(root: Path) -> dict[str, Project]:
    """Return each member's [project] table by distribution name."""
    projects: dict[str, Project] = {}
    for path in sorted((root / "packages").glob("*/pyproject.toml")):
        project: Project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        projects[str(project["name"])] = project
    return projects


def requirements(project: Project) -> list[str]:
    """Return what the project requires, extras included."""
    found: list[str] = []
    dependencies, extras = project.get("dependencies"), project.get("optional-dependencies")
    if isinstance(dependencies, list):
        found += [str(line) for line in dependencies]
    if isinstance(extras, dict):
        found += [str(line) for lines in extras.values() for line in lines]
    return found


def stale_literals(root: Path, projects: dict[str, Project]) -> list[str]:
    """Return one line for each `__version__` in a package's source that is not its project's version."""
    lines = []
    for name, project in projects.items():
        for path in sorted((root / "packages" / name / "src").glob("*/__init__.py")):
            literals = re.findall(
                r'^__version__ = "([^"]*)"$', path.read_text(encoding="utf-8"), re.MULTILINE
            )
            lines += [
                f"{name}: __version__ is {literal!r}; it must be {project['version']!r}"
                for literal in literals
                if literal != project["version"]
            ]
    return lines


def complaints(projects: dict[str, Project]) -> list[str]:
    """Return one line for each version or internal requirement that is out of step."""
    versions = {name: str(project["version"]) for name, project in projects.items()}
    if not versions:
        return ["no members found under packages/"]
    lines = []
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name} {version}" for name, version in versions.items())
        lines.append(f"versions differ: {listed}; run tools/bump.py to set them all")
    for name, project in projects.items():
        for requirement in requirements(project):
            target = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
            exact = re.fullmatch(
                rf"{re.escape(target)}(\[[^]]*\])?=={re.escape(versions.get(target, ''))}", requirement
            )
            if target in versions and not exact:
                lines.append(f"{name} requires {requirement!r}; it must be {target}=={versions[target]}")
    return lines


def main(arguments: list[str]) -> int:
    """Print the complaints; 0 when there are none."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parent.parent
    projects = read_projects(root)
    found = complaints(projects) + stale_literals(root, projects)
    print("\n".join(found) if found else "all versions are in step")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
