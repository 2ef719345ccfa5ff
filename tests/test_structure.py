"""The structure of the source: which folder may import which, what core may import, and the public names.

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
    "core combinations",
    "arguments config_file tiers kernels events_wire",
    "models",
    "engine",
    "serve",
    "cluster",
    "replay adapters plan",
    "bench",
    "cli",
    "completion config_command doctor __main__",
]
"""Imports point to the left; folders in one entry do not import each other."""
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


@cache
def nodes(module: str) -> list[ast.AST]:
    """All nodes of a module's tree. Many tests read them."""
    return list(ast.walk(tree(module)))


def room(module: str) -> str | None:
    """The folder or file under kvloom that a module belongs to; None for what is outside."""
    parts = module.split(".")
    return parts[1] if parts[0] == "kvloom" and len(parts) > 1 else None


@cache
def imports(module: str) -> list[tuple[str, int]]:
    """Every absolute name a module imports, anywhere in it, with its line."""
    package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    found = []
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            # `from kvloom import core` names a folder, too.
            found += [
                (f"{base}.{alias.name}" if base == "kvloom" else base, node.lineno) for alias in node.names
            ]
    return found


def modules_of(part: str) -> list[str]:
    """The modules of a folder or file under kvloom. The package's own `__init__` is the part "kvloom"."""
    return [module for module in MODULES if (room(module) or "kvloom") == part]


PARTS = sorted({room(module) or "kvloom" for module in MODULES})
CORE = modules_of("core")


def test_there_is_something_to_check() -> None:
    assert {"kvloom.core.layout.layer_spec", "kvloom.models.specs.layer_specs", "kvloom.cli"} <= set(MODULES)


@pytest.mark.parametrize(
    "here", sorted({*PARTS} - {"kvloom"})
)  # the package imports what is asked of it, when asked
def test_imports_point_one_way(here: str) -> None:
    assert here in RANK, f"{here!r} is a new folder: add it to LINE"
    wrong = [
        f"{module} line {line}: {name}"
        for module in modules_of(here)
        for name, line in imports(module)
        if (there := room(name)) is not None and there != here and RANK[there] >= RANK[here]
    ]
    assert not wrong, f"{here!r} may import only from its left in {LINE}: {wrong}"


def test_the_package_itself_imports_nothing_heavy() -> None:
    code = "import sys, kvloom; print([m for m in ('numpy', 'torch', 'transformers') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_core_imports_the_standard_library_and_numpy_and_does_no_io() -> None:
    for module in CORE:
        foreign = {name.split(".")[0] for name, _ in imports(module)} - {"kvloom"}
        assert foreign <= CORE_MAY_IMPORT, module
        assert not foreign & INPUT_OUTPUT, module
        calls = [node.func for node in nodes(module) if isinstance(node, ast.Call)]
        names = {call.id for call in calls if isinstance(call, ast.Name)}
        assert not names & {"open", "print"}, module


@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_pickled(part: str) -> None:
    found = {
        module: used
        for module in modules_of(part)
        if (used := {name.split(".")[0] for name, _ in imports(module)} & NEVER)
    }
    assert not found


@pytest.mark.parametrize("part", PARTS)
def test_a_module_says_what_it_is_for(part: str) -> None:
    trees = {module: tree(module) for module in modules_of(part)}
    assert not [module for module, found in trees.items() if found.body and not ast.get_docstring(found)]


def test_importing_core_loads_no_torch() -> None:
    code = f"import sys, {', '.join(CORE)}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(done.stdout.split())
    assert "numpy" in loaded or "kvloom" in loaded
    assert not loaded & {"torch", "transformers", "rich", "msgspec"}


def dependencies(modules: list[str]) -> dict[str, set[str]]:
    """The modules of `modules` that each of them imports; a package's own `__init__` is the package."""
    found: dict[str, set[str]] = {module: set() for module in modules}
    for module in modules:
        package = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
        for node in nodes(module):
            if not isinstance(node, ast.ImportFrom):
                continue
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            for alias in node.names:
                if alias.name.startswith("_"):  # compiled: imports nothing
                    continue
                for name in (f"{base}.{alias.name}", base):
                    if name in found:
                        found[module].add(name)
                        break
        found[module].discard(module)
    return found


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """The members of import circles, in order; empty if there is none."""
    left = {name: set(targets) for name, targets in arrows.items()}
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


ROOMS = sorted({here for name in MODULES if (here := room(name)) is not None})
FOLDERS = sorted({name for name, path in MODULES.items() if path.name == "__init__.py" and name.count(".")})


@pytest.mark.parametrize("here", ROOMS)
def test_no_import_circles_between_files(here: str) -> None:
    assert circle(dependencies([name for name in MODULES if room(name) == here])) == []


def arrows_between_members(folder: str) -> dict[str, set[str]]:
    """Return the members of a folder, which are its files and folders, and for each member the members it imports.
    The folder's `__init__` is not a member."""
    inside = [name for name in MODULES if name.startswith(f"{folder}.")]

    def member(module: str) -> str:
        return module.removeprefix(f"{folder}.").split(".")[0]

    arrows: dict[str, set[str]] = {member(module): set() for module in inside}
    for module, targets in dependencies(inside).items():
        arrows[member(module)] |= {member(target) for target in targets} - {member(module)}
    return arrows


def floors(arrows: dict[str, set[str]]) -> int:
    """Return the number of members on the longest chain of imports. `arrows` must have no circle."""

    @cache
    def floor(member: str) -> int:
        return 1 + max(map(floor, arrows[member]), default=0)

    return max(map(floor, arrows))


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_circles_between_members_of_a_folder(folder: str) -> None:
    assert circle(arrows_between_members(folder)) == []


def test_core_has_few_floors_and_arrows() -> None:
    arrows = arrows_between_members("kvloom.core")
    assert len(arrows) > 10
    assert floors(arrows) <= 9, arrows
    assert sum(map(len, arrows.values())) <= 60, arrows


@pytest.mark.parametrize("part", sorted({*PARTS} - {"core"}))
def test_only_names_of_kvloom_core_are_imported_outside_it(part: str) -> None:
    inside = [
        f"{module} line {line}: {name}"
        for module in modules_of(part)
        for name, line in imports(module)
        if name.startswith("kvloom.core.")
    ]
    assert not inside, "import from kvloom.core; export the name there if it is missing"


LONGEST = 100
"""Largest number of lines of a function. Kernels are excepted, because a kernel cannot be divided freely."""


@pytest.mark.parametrize("part", sorted({*PARTS} - {"kernels"}))
def test_functions_are_not_too_long(part: str) -> None:
    long = [
        f"{module} line {node.lineno}: {node.name}"
        for module in modules_of(part)
        for node in nodes(module)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= LONGEST
    ]
    assert not long, f"divide these functions of more than {LONGEST} lines: {long}"


@cache
def owners() -> dict[str, set[str]]:
    """Return, for each attribute and method of a class in kvloom, the folders that have such a class."""
    found: dict[str, set[str]] = {}
    for module in MODULES:
        for node in nodes(module):
            names = []
            if isinstance(node, ast.ClassDef):
                names = [n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and receiver(node) == "self"
            ):
                names = [node.attr]
            for name in names:
                found.setdefault(name, set()).add(room(module) or "kvloom")
    return found


def receiver(node: ast.Attribute) -> str:
    """Return the last name before the attribute: `cache` for `self.cache.state`."""
    value = node.value.func if isinstance(node.value, ast.Call) else node.value
    return getattr(value, "attr", None) or getattr(value, "id", "")


NOT_OURS = {
    "bench": {"_backend"},  # FlashInfer
    "models": {"_timeout"},  # torch.distributed
    "tiers": {"_endpoint"},  # boto3
}
"""Private attributes of other packages that also exist in classes of another folder."""


@pytest.mark.parametrize("part", PARTS)
def test_private_attributes_are_used_only_in_their_folder(part: str) -> None:
    wrong = [
        f"{module} line {node.lineno}: {ast.unparse(node)}"
        for module in modules_of(part)
        for node in nodes(module)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if receiver(node) not in ("self", "cls") and node.attr not in NOT_OURS.get(part, ())
        if part not in owners().get(node.attr, {part})
    ]
    assert not wrong, f"call a public method of the owner; add one if it is missing: {wrong}"


@pytest.mark.parametrize("part", sorted({*PARTS} - {"core"}))
def test_the_components_of_a_cache_are_used_only_in_core(part: str) -> None:
    wrong = [
        f"{module} line {node.lineno}: {ast.unparse(node)}"
        for module in modules_of(part)
        for node in nodes(module)
        if isinstance(node, ast.Attribute) and node.attr == "state" and receiver(node).strip("_") == "cache"
    ]
    assert not wrong, f"call a method of KVCache, `cache.inspect` or `cache.loading`: {wrong}"


PUBLIC = ("kvloom", "kvloom.core", "kvloom.engine", "kvloom.tiers")
"""The packages whose names are the public interface; names of other modules may change freely."""


def public_names() -> dict[str, list[str]]:
    """`__all__` of the public packages, as far as they state one."""
    return {module: names for module, names in stated_names().items() if module in PUBLIC}


@cache
def stated_names() -> dict[str, list[str]]:
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


def test_a_module_states_its_public_names() -> None:
    public = {module for module, path in MODULES.items() if path.name[0] != "_"}
    assert not public - stated_names().keys(), "these modules have no __all__"


LAYERED = ["tiers"]
"""Packages whose folders have interfaces: other code imports the names in a folder's `__all__`."""


def folder(module: str) -> str:
    """Return the package of a module: itself for an `__init__`."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def imported(module: str) -> Iterator[tuple[str, str, int]]:
    """Yield (module, name, line) of every `from … import`, with absolute module names."""
    for node in nodes(module):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = folder(module).split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            yield from ((base, alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names)


@pytest.mark.parametrize("package", LAYERED)
def test_other_code_imports_the_interface_of_a_folder(package: str) -> None:
    top, names, wrong = f"kvloom.{package}", stated_names(), []
    for module in MODULES:
        for base, name, line in imported(module):
            if base != top and not base.startswith(f"{top}."):
                continue
            inside = module == top or module.startswith(f"{top}.")
            same = base in MODULES and folder(module) == folder(base)
            in_root = inside and base in MODULES and folder(base) == top and base != top
            native = f"{base}.{name}" == f"{top}._native"
            interface = base in MODULES and folder(base) == base and name in names[base]
            if not (same or in_root or native or interface):
                wrong.append(f"{module} line {line}: {name} of {base}")
    assert not wrong, f"import public names of {top} or of its folders: {wrong}"


def test_every_line_of_slow_tests_names_a_test() -> None:
    for line in (Path(__file__).parent / "slow_tests.txt").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            path, _, name = line.partition("::")
            source = (Path(__file__).parent.parent / path).read_text(encoding="utf-8")
            assert name.split("::")[0].split("[")[0] in source, line


if __name__ == "__main__":
    PINS.write_text(json.dumps(public_names(), indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"wrote {PINS}")
