"""The house rules: arrows point one way, nothing props up a covariance, and the pages run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ornstein"

# Each room may use the rooms above it, never below. A room is a file or a folder of src/ornstein;
# "ornstein" is the public namespace itself (__init__.py).
ROOMS = [
    "files",
    "parts",
    "gpu",
    "compiling",
    "linalg",
    "schedules",
    "clock",
    "panels",
    "transition",
    "matrices",
    "process",
    "diffusion",
    "processes",
    "diagnostics",
    "provenance",
    "draws",
    "times",
    "likelihood",
    "truncation",
    "sharing",
    "answers",
    "histogram",
    "residuals",
    "score",
    "terms",
    "objectives",
    "networks",
    "pilot",
    "examples",
    "ledger",
    "work",
    "evaluation",
    "sampling",
    "ode",
    "wayback",
    "data",
    "quality",
    "adapters",
    "training",
    "bench",
    "reproduce",
    "ornstein",
    "viz",
    "cli",
    "__main__",
]

FOLDERS = (
    "gpu",
    "networks",
    "sharing",
    "sampling",
    "ode",
    "wayback",
    "data",
    "quality",
    "adapters",
    "training",
    "bench",
    "reproduce",
    "viz",
    "cli",
)

FILES = sorted(SOURCE.rglob("*.py"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def room_of(path: Path) -> str:
    """The room that a file belongs to."""
    first = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    return "ornstein" if first == "__init__" else first


def imported(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Line and room of every import from this package."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, f"a relative import in {path.name}"
            elif node.module == "ornstein":
                for name in node.names:
                    yield node.lineno, name.name if name.name in ROOMS else "ornstein"
            elif node.module and node.module.startswith("ornstein."):
                yield node.lineno, node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            for name in node.names:
                parts = name.name.split(".")
                if parts[0] == "ornstein":
                    yield node.lineno, parts[1] if len(parts) > 1 else "ornstein"


def named(path: Path) -> str:
    """A path as the reader knows it."""
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", FILES, ids=named)
def test_every_module_has_a_room(path: Path) -> None:
    assert room_of(path) in ROOMS, (
        f"{named(path)} is in no room; list {room_of(path)!r} in ROOMS of tests/test_rooms.py, "
        "below all rooms that it imports and above all that import it, and in docs/architecture.md."
    )


@pytest.mark.parametrize("path", FILES, ids=named)
def test_arrows_point_up(path: Path) -> None:
    here = room_of(path)
    for line, room in imported(ast.parse(path.read_text(encoding="utf-8")), path):
        assert room in ROOMS, f"{named(path)}:{line} imports {room}, which is not a room"
        allowed = ROOMS.index(room) < ROOMS.index(here)
        assert allowed or (room == here and here in FOLDERS), (
            f"{named(path)}:{line} imports the room {room!r} from {here!r}, which stands above it; "
            "move the code to the room that may know both."
        )


def test_the_list_has_no_empty_rooms() -> None:
    assert {room_of(path) for path in FILES} == set(ROOMS)


def test_the_map_shows_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    missing = [room for room in ROOMS if f"`{room}`" not in page]
    assert not missing, f"docs/architecture.md says nothing about {missing}"


# ---------------------------------------------------------------------------------- habits


def _is_eye(node: ast.AST) -> bool:
    return any(
        (isinstance(part, ast.Attribute) and part.attr == "eye")
        or (isinstance(part, ast.Name) and part.id in ("eye", "identity"))
        for part in ast.walk(node)
    )


def crimes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and description of everything that this project does not do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.lineno, "an assert: raise a ValueError that says what to do"
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "a bare except: name what can go wrong"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            if any(name.split(".")[0] in ("pickle", "dill", "cloudpickle") for name in names):
                yield node.lineno, "pickle: nothing is ever unpickled"
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.Add):
            sides = [node.value] if isinstance(node, ast.AugAssign) else [node.left, node.right]
            for side in sides:
                scaled = isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult)
                if scaled and _is_eye(side):
                    yield node.lineno, "a multiple of the identity is added: build the factor"
        if isinstance(node, ast.Attribute) and node.attr == "fill_diagonal_":
            yield node.lineno, "a diagonal is overwritten: build the factor"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "add_"
            and "diagonal" in ast.unparse(node.func.value)
        ):
            yield node.lineno, "something is added to a diagonal: build the factor"


@pytest.mark.parametrize("path", FILES, ids=named)
def test_habits(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = [f"{named(path)}:{line}: {what}" for line, what in crimes(ast.parse(text))]
    found += [
        f"{named(path)}:{number}: the word itself"
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"jitter|nugget", line, re.IGNORECASE)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "assert x",
        "try:\n    f()\nexcept:\n    pass",
        "import pickle",
        "from pickle import loads",
        "cov = cov + eps * torch.eye(3)",
        "cov += torch.eye(3).to(cov) * 1e-4",
        "cov.diagonal(dim1=-2, dim2=-1).add_(1e-6)",
    ],
)
def test_the_check_of_habits_sees(code: str) -> None:
    assert list(crimes(ast.parse(code)))


# ---------------------------------------------------------------------------------- pages


def blocks() -> Iterator[tuple[str, str]]:
    """Every Python block of the pages, with its place."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", match[1]


BLOCKS = dict(blocks())


@pytest.mark.parametrize("place", BLOCKS)
def test_code_on_the_pages_runs(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCKS[place], place, "exec"), {"__name__": "page"})


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{named(page)} links to {target}"


def test_readme_has_code_and_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert any(place.startswith("README.md") for place in BLOCKS)
    assert re.search(r"!\[[^]]*\]\(docs/images/[^)]+\.png\)", text)
