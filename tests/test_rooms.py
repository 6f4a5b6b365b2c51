"""How the package is built up: which room may import which, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "labkit"
# A room imports from itself and from the rooms before it.
ROOMS = ["models", "devices", "measure", "parallel", "lab"]
MAX_LINES = 300
VAGUE_NAMES = {"utils", "util", "common", "helpers", "misc"}
# Which file may look up an environment variable, and what for.
MAY_READ_ENVIRONMENT = {
    "devices/backends.py": "CUDA_VISIBLE_DEVICES says which accelerators this process counts",
    "devices/nvml.py": "CUDA_VISIBLE_DEVICES, where no torch device says which GPUs are meant",
    "lab/headless/execution.py": "PYTHONPATH, which it extends for the notebook's process",
}
LOOK_UP = re.compile(r"(os\.)?(environ(b)?(\[|\.get\()|getenv(b)?\()|.* (not )?in (os\.)?environ$")
MODULES = sorted(PACKAGE.rglob("*.py"))
IN_ROOMS = [path for path in MODULES if path.parent != PACKAGE]


def in_package(path: Path) -> str:
    """Where a file lies in the package, such as devices/needs.py."""
    return path.relative_to(PACKAGE).as_posix()


def absolute(node: ast.ImportFrom, path: Path) -> str:
    """The module that "from ... import" names, with leading dots resolved."""
    if not node.level:
        return node.module or ""
    package = path.relative_to(PACKAGE.parent).parent.parts
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def imported_names(source: str, path: Path) -> Iterator[str]:
    """Every dotted name that the source imports, wherever in the file the import stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{absolute(node, path)}.{alias.name}" for alias in node.names)


def forbidden_imports(source: str, path: Path) -> list[str]:
    """What a file in a room imports from a later room, or from labkit itself."""
    allowed = ROOMS[: ROOMS.index(path.relative_to(PACKAGE).parts[0]) + 1]
    ours = [name for name in imported_names(source, path) if name.split(".")[0] == "labkit"]
    return [name for name in ours if (name.split(".") + [""])[1] not in allowed]


def environment_reads(source: str) -> list[int]:
    """Lines that look something up in os.environ; passing a whole copy on is not a look-up."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        stored = isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        looks_up = isinstance(node, ast.Subscript | ast.Call | ast.Compare) and not stored
        if looks_up and LOOK_UP.match(ast.unparse(node)):
            lines.add(node.lineno)
    return sorted(lines)


def test_there_are_the_rooms_of_the_plan_and_no_others():
    folders = {path.relative_to(PACKAGE).parts[0] for path in IN_ROOMS}
    assert folders <= set(ROOMS)


@pytest.mark.parametrize("path", IN_ROOMS, ids=in_package)
def test_a_room_imports_only_from_itself_and_the_rooms_before_it(path):
    assert forbidden_imports(path.read_text(), path) == []


@pytest.mark.parametrize(
    "line",
    [
        "import labkit.lab.claims",
        "import labkit",
        "from labkit import Ranks",
        "from labkit.lab import claims",
        "from labkit.lab.claims import claim",
        "from ..lab import claims",
        "from .. import lab",
        "def late():\n    from ..parallel.schedules import gpipe",
    ],
)
def test_an_import_from_a_later_room_is_found(line):
    assert len(forbidden_imports(line, PACKAGE / "measure" / "timers.py")) == 1


@pytest.mark.parametrize(
    "line",
    [
        "import torch",
        "import labkit.devices.ranks.ranks",
        "from labkit.measure import timeline",
        "from .timeline import Span",
        "from ..devices.backends import backend",
    ],
)
def test_an_import_from_the_same_or_an_earlier_room_is_allowed(line):
    assert forbidden_imports(line, PACKAGE / "measure" / "timers.py") == []


@pytest.mark.parametrize("path", MODULES, ids=in_package)
def test_a_file_has_one_purpose_in_its_name_and_stays_short(path):
    assert path.stem not in VAGUE_NAMES, f"{path.name} says nothing about what it holds"
    lines = path.read_text().count("\n")
    assert lines <= MAX_LINES, f"{lines} lines, at most {MAX_LINES}: split it"


@pytest.mark.parametrize("path", MODULES, ids=in_package)
def test_library_functions_read_no_environment_variables(path):
    if in_package(path) not in MAY_READ_ENVIRONMENT:
        assert environment_reads(path.read_text()) == [], "make it an argument"


def test_files_that_may_read_the_environment_exist_and_do():
    for name in MAY_READ_ENVIRONMENT:
        assert environment_reads((PACKAGE / name).read_text()), f"{name} needs no exception"


@pytest.mark.parametrize(
    "line, found",
    [
        ("os.environ['HOME']", 1),
        ("os.environ.get('HOME')", 1),
        ("environ.get('HOME', '')", 1),
        ("os.getenv('HOME')", 1),
        ("'HOME' in os.environ", 1),
        ("os.environ['OMP_NUM_THREADS'] = '1'", 0),
        ("dict(os.environ, OMP_NUM_THREADS='1')", 0),
        ("{**os.environ}", 0),
    ],
)
def test_looking_up_a_variable_is_found_and_passing_the_environment_on_is_not(line, found):
    assert len(environment_reads(line)) == found


# One character of each stands in brackets, so that this file does not hold what it looks for.
OF_ONE_MACHINE = re.compile(
    r"(?<![\w.])/([w]ork|[h]ome|[r]oot|[U]sers|[o]pt|[m]nt)/\w"
    r"|[p]ypi\.org|[p]ythonhosted|[p]ytorch\.org/whl|[a]naconda\.org|[r]egistry\.npmjs|[d]eb\.debian"
)


def tracked_files() -> list[Path]:
    """What git tracks, without pictures."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [path for path in paths if path.suffix not in {".png", ".jpg"} and path.exists()]


def test_no_file_names_a_folder_of_one_machine_or_a_package_host():
    found = []
    for path in tracked_files():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if match := OF_ONE_MACHINE.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]}")
    assert found == []


@pytest.mark.parametrize("text", ["cd /wor" + "k/main", "'/hom" + "e/a'", "pyp" + "i.org"])
def test_a_machine_folder_and_a_package_host_are_found(text):
    assert OF_ONE_MACHINE.search(text)
