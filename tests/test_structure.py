"""The shape of the source: which room may import which, what core may import, and the public names.

Public names are pinned in public_names.json; after a change that is meant, run this file:
    .venv/bin/python tests/test_structure.py
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "kvloom"
PINS = Path(__file__).parent / "public_names.json"

LINE = [
    "core",
    "arguments tiers kernels",
    "models",
    "engine",
    "serve",
    "cluster",
    "replay adapters plan",
    "bench",
    "cli",
]
"""Imports point to the left; rooms of one place do not import each other."""
RANK = {room: rank for rank, rooms in enumerate(LINE) for room in rooms.split()}

CORE_MAY_IMPORT = {*sys.stdlib_module_names, "numpy"}
INPUT_OUTPUT = {
    *("asyncio", "ctypes", "fcntl", "http", "io", "mmap", "multiprocessing", "os", "pathlib", "selectors"),
    *("shutil", "socket", "ssl", "subprocess", "tempfile", "urllib"),
}
NEVER = {"pickle", "marshal", "shelve"}


def module_name(path: Path) -> str:
    parts = ("kvloom", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


def room(module: str) -> str | None:
    """The folder or file under kvloom that a module belongs to; None for what is outside."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kvloom" and len(parts) > 1 else None


def imports(module: str) -> Iterator[tuple[str, int]]:
    """Every absolute name a module imports, anywhere in it, with its line."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            # `from kvloom import core` names a room, too.
            yield from (
                (f"{base}.{alias.name}" if base == "kvloom" else base, node.lineno) for alias in node.names
            )


def test_there_is_something_to_check() -> None:
    assert {"kvloom.core.layout.layer_spec", "kvloom.models.specs.layer_specs", "kvloom.cli"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module: str) -> None:
    here = room(module)
    if here is None:  # kvloom/__init__.py names what users want first, and imports it when asked
        return
    assert here in RANK, f"{here!r} is a new room: give it a place in LINE"
    wrong = [
        f"line {line}: {name}"
        for name, line in imports(module)
        if (there := room(name)) is not None and there != here and RANK[there] >= RANK[here]
    ]
    assert not wrong, f"{module} may import only from the left of {here!r} in {LINE}: {wrong}"


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, kvloom; print([m for m in ('numpy', 'torch', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


@pytest.mark.parametrize("module", [name for name in MODULES if room(name) == "core"])
def test_core_imports_the_standard_library_and_numpy_and_does_no_io(module: str) -> None:
    foreign = {name.split(".")[0] for name, _ in imports(module)} - {"kvloom"}
    assert foreign <= CORE_MAY_IMPORT
    assert not foreign & INPUT_OUTPUT
    calls = [node for node in ast.walk(tree(module)) if isinstance(node, ast.Call)]
    assert not [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id in ("open", "print")]


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_pickled(module: str) -> None:
    assert not {name.split(".")[0] for name, _ in imports(module)} & NEVER


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for(module: str) -> None:
    assert not tree(module).body or ast.get_docstring(tree(module))


def test_importing_core_loads_no_torch() -> None:
    core = [name for name in MODULES if room(name) == "core"]
    code = f"import sys, {', '.join(core)}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "numpy" in loaded or "kvloom" in loaded
    assert not loaded & {"torch", "transformers", "rich", "msgspec"}


def public_names() -> dict[str, list[str]]:
    """`__all__` of every module that states one."""
    names = {}
    for module in MODULES:
        for node in tree(module).body:
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
            ):
                names[module] = sorted(ast.literal_eval(node.value))
    return names


def test_public_names_are_pinned() -> None:
    pinned = json.loads(PINS.read_text(encoding="utf-8"))
    assert public_names() == pinned, "if the change is meant: .venv/bin/python tests/test_structure.py"


@pytest.mark.parametrize("module", [m for m, path in MODULES.items() if path.name[0] != "_"])
def test_a_module_states_its_public_names(module: str) -> None:
    assert module in public_names(), f"{module} has no __all__"


if __name__ == "__main__":
    PINS.write_text(json.dumps(public_names(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {PINS}")
