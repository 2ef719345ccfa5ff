"""Public names are typed and documented, and the package says so to type checkers (docs/library.md, "Stability")."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvloom.core import Entry
from kvloom.engine import Request, SamplingParams

ROOT = Path(__file__).parent.parent
NAMES = [
    (module, name)
    for module, names in json.loads((ROOT / "tests/public_names.json").read_text(encoding="utf-8")).items()
    for name in names
]


@cache
def documented_assignments() -> set[str]:
    """Name that are assigned at the top of a module and documented by the string after the assignment."""
    found = set()
    for path in sorted((ROOT / "src/kvloom").rglob("*.py")):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node, after in pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def untyped(function: Callable[..., Any], skip_first: bool) -> list[str]:
    """Parameters without a type hint, and `return`."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[skip_first:]
    found = [one.name for one in parameters if one.annotation is inspect.Parameter.empty]
    return found + ["return"] * (signature.return_annotation is inspect.Signature.empty)


def members(kind: type) -> Iterator[tuple[str, Callable[..., Any], bool]]:
    """Public methods and properties that a class of kvloom defines: name, function, whether it has `self` or `cls`."""
    for base in kind.__mro__:
        if not base.__module__.startswith("kvloom"):
            continue
        for name, value in vars(base).items():
            function = getattr(value, "fget", None) or getattr(value, "func", None)
            function = function or getattr(value, "__func__", value)
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, function, not isinstance(value, staticmethod)


@cache
def documented_by_protocols() -> set[str]:
    """Methods and properties that a public protocol documents, such as those of Tier, Policy and Clock."""
    public = [getattr(importlib.import_module(module), name) for module, name in NAMES]
    protocols = [one for one in public if getattr(one, "_is_protocol", False)]
    return {member for one in protocols for member, function, _ in members(one) if function.__doc__}


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_is_typed_and_documented(module: str, name: str) -> None:
    one = getattr(importlib.import_module(module), name)
    if inspect.isclass(one):
        # A dataclass without a docstring gets its signature as one.
        assert not (one.__doc__ or f"{name}(").startswith(f"{name}("), f"{module}.{name} has no docstring"
        shared = set() if getattr(one, "_is_protocol", False) else documented_by_protocols()
        for member, function, skip in members(one):
            assert function.__doc__ or member in shared, f"{module}.{name}.{member} has no docstring"
            assert not untyped(function, skip), f"{module}.{name}.{member} lacks type hints"
    elif inspect.isroutine(one):
        assert one.__doc__, f"{module}.{name} has no docstring"
        if inspect.isfunction(one):
            assert not untyped(one, False), f"{module}.{name} lacks type hints"
    else:
        assert name in documented_assignments(), f"{module}.{name} has no string after its assignment"


def test_the_package_is_marked_as_typed() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in settings["tool"]["setuptools"]["package-data"]["kvloom"]
    assert (ROOT / "src/kvloom/py.typed").exists()


def test_deprecated_names_work_and_state_their_replacement() -> None:
    request = Request(7, (3, 4), SamplingParams(max_tokens=1), priority=2)
    with pytest.warns(DeprecationWarning, match=r"use Request\.sort_key"):
        assert request.rank == request.sort_key == (-2, 7)

    class Kept:
        def retention_priority(self, now: float) -> int:
            return int(now)

    with pytest.warns(DeprecationWarning, match=r"use Entry\.retention_priority"):
        assert Entry.rank(Kept(), 5.0) == 5  # type: ignore[arg-type]
