"""Who may import whom, read from the import statements: each row imports only from rows above."""

from __future__ import annotations

import ast
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import cotrt

# Row by row from the top; the rooms of one row do not import each other except as ALSO says.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors", "options"),
    ("plan",),
    ("tree", "kernels", "models", "sampling", "saved"),
    ("engine",),
    ("outputs", "testing"),
    ("program",),
    ("search",),
    ("viewer", "server", "client", "cli", "bench", "__main__"),
)
FREE_WITHIN_ROW = {0, 7}
ALSO = {("models", "kernels"), ("sampling", "kernels")}
ONLY_IMPORTED_BY = {"tree": {"engine", "bench"}}
NO_TORCH = ("errors", "options/sampling", "plan", "saved", "tree")

# Rooms within a room, from the top, "." being the files that lie in the room itself: each imports
# from its own floor and those before it. Imports for type checkers alone may look ahead.
FLOORS = {
    "tree": ("attention", ".", "tiers", "schedule"),
    "engine": ("model", "records", "."),
}

ROW_OF = {room: row for row, rooms in enumerate(ROWS) for room in rooms}
PACKAGE = Path(__file__).resolve().parent.parent / "cotrt"
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def _has_no_torch(path: Path) -> bool:
    name = path.relative_to(PACKAGE).with_suffix("").as_posix()
    return any(name == place or name.startswith(f"{place}/") for place in NO_TORCH)


def _package(path: Path) -> list[str]:
    return ["cotrt", *path.relative_to(PACKAGE).parts[:-1]]


def _import_nodes(source: str, typed: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    ahead: deque[ast.AST] = deque([ast.parse(source)])
    while ahead:
        node = ahead.popleft()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not typed:
            ahead.extend(node.orelse)
        else:
            ahead.extend(ast.iter_child_nodes(node))


def _imports(source: str, package: list[str], *, typed: bool = True) -> Iterator[tuple[int, str]]:
    """Every imported module of a file with its line; `typed`: those for type checkers too."""
    for node in _import_nodes(source, typed):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "cotrt":
                # A public name stands for the module that it lives in.
                for alias in node.names:
                    yield node.lineno, cotrt._HOME_OF.get(alias.name, f"cotrt.{alias.name}")
            else:
                yield node.lineno, module


def _imports_of(path: Path, *, typed: bool = True) -> Iterator[tuple[int, str]]:
    return _imports(path.read_text(encoding="utf-8"), _package(path), typed=typed)


def _rooms_imported(path: Path) -> Iterator[tuple[int, str]]:
    for line, module in _imports_of(path):
        parts = module.split(".")
        if parts[0] == "cotrt" and len(parts) > 1 and parts[1] != "__version__":
            yield line, parts[1]


def test_every_file_belongs_to_a_row() -> None:
    assert {_room(path) for path in SOURCES} <= set(ROW_OF)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_upward(path: Path) -> None:
    room = _room(path)
    for line, other in _rooms_imported(path):
        if other == room:
            continue
        where = f"{path.name}:{line}: {room} imports {other}"
        assert other in ROW_OF, f"{where}, which is no room of the house"
        above = ROW_OF[other] < ROW_OF[room]
        beside = ROW_OF[other] == ROW_OF[room] and (
            ROW_OF[room] in FREE_WITHIN_ROW or (room, other) in ALSO
        )
        assert above or beside, f"{where}, which is not above it"
        assert room in ONLY_IMPORTED_BY.get(other, {room}), f"{where}, which is engine's alone"


def _floor(room: str, parts: Sequence[str]) -> int:
    floors = FLOORS[room]
    return floors.index(parts[0] if parts[0] in floors else ".")


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if _room(path) in FLOORS],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_rooms_within_a_room_import_from_floors_above(path: Path) -> None:
    room = _room(path)
    own = _floor(room, path.relative_to(PACKAGE / room).with_suffix("").parts)
    for line, module in _imports_of(path, typed=False):
        if not module.startswith(f"cotrt.{room}"):
            continue
        parts = module.split(".")[2:]
        where = f"{path.name}:{line} imports {module}"
        assert parts, f"{where}: name the file that it needs"
        assert _floor(room, parts) <= own, f"{where}, which is below {FLOORS[room][own]!r}"


def test_every_room_within_a_room_has_a_floor() -> None:
    for room, floors in FLOORS.items():
        names = {
            path.relative_to(PACKAGE / room).parts[0] for path in (PACKAGE / room).rglob("*.py")
        }
        assert {name for name in names if not name.endswith(".py")} <= set(floors)
        assert set(floors) <= {".", *(name.removesuffix(".py") for name in names)}


@pytest.mark.parametrize(
    "path",
    [path for path in SOURCES if _has_no_torch(path)],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_policy_and_plans_import_no_torch(path: Path) -> None:
    for line, module in _imports_of(path):
        assert module.split(".")[0] != "torch", f"{path.name}:{line} imports torch"


def test_the_reader_of_imports_sees_every_form() -> None:
    source = (
        "import torch, os.path\n"
        "from ..tree import kv_tree\n"
        "from cotrt import plan, LLM\n"
        "def f():\n    from . import driver\n"
    )
    found = [module for _, module in _imports(source, ["cotrt", "engine"])]
    assert found[:3] == ["torch", "os.path", "cotrt.tree"]
    assert found[3:] == ["cotrt.plan", "cotrt.program.llm", "cotrt.engine"]
    guarded = "if TYPE_CHECKING:\n    import torch\nelse:\n    import numpy\n"
    assert [module for _, module in _imports(guarded, [])] == ["torch", "numpy"]
    assert [module for _, module in _imports(guarded, [], typed=False)] == ["numpy"]
