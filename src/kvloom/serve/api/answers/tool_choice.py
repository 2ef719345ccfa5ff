"""Checks the tools of a request, and builds the grammar that forces a call.

A forced answer is a JSON array of calls, for every model and template: [{"name": "f", "arguments": {…}}]. The
arguments follow the JSON schema of the function. `ForcedCalls` parses such an answer.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kvloom.serve.errors import bad_request

__all__ = [
    "JSON_SPACING",
    "STRICT",
    "Tools",
    "call_rules",
    "check_tools",
    "forced_functions",
    "forced_grammar",
]

MAX_TOOLS = 128
NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
JSON_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The spaces that JSON may contain. If spaces were allowed anywhere, a small model might write only spaces."""

STRICT = "answer: strict\n"
"""The first line of a grammar for free text in which calls of strict functions follow their schemas."""
MORE_CALLS = '(", " call)*'

Tools = list[dict[str, Any]]


def check_tools(tools: Tools | None) -> None:
    """Raise ApiError for tools that are not functions with distinct names."""
    names: set[str] = set()
    if len(tools or ()) > MAX_TOOLS:
        raise bad_request(f"tools: {len(tools or ())} exceed the limit of {MAX_TOOLS}: send fewer", "tools")
    for place, tool in enumerate(tools or ()):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise bad_request(f'tools[{place}] must be {{"type": "function", "function": {{…}}}}', "tools")
        name, schema = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or NAME.fullmatch(name) is None:
            raise bad_request(
                f"tools[{place}]: function.name must be 1 to 64 letters, digits or _.-", "tools"
            )
        if name in names:
            raise bad_request(f"tools[{place}]: the name {name!r} is used twice: rename one", "tools")
        if schema is not None and not isinstance(schema, dict):
            raise bad_request(f"tools[{place}]: function.parameters must be a JSON schema", "tools")
        if function.get("strict") not in (None, True, False):
            raise bad_request(f"tools[{place}]: function.strict must be true or false", "tools")
        names.add(name)


def forced_functions(tools: Tools | None, choice: str | dict[str, Any] | None) -> Tools | None:
    """Return the functions that `choice` (the request field `tool_choice`) forces the model to call. Return None if
    the choice forces no call. Raises ApiError for an invalid choice.
    """
    if choice in (None, "auto", "none"):
        return None
    functions: Tools = [tool["function"] for tool in tools or ()]
    if choice == "required":
        if not functions:
            raise bad_request("tool_choice required needs tools: send at least one", "tool_choice")
        return functions
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(choice, dict) or choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(
            'tool_choice must be "auto", "none", "required", or {"type": "function", "function": {"name": …}}',
            "tool_choice",
        )
    found = [function for function in functions if function["name"] == name]
    if not found:
        raise bad_request(f"tool_choice: no tool is called {name[:64]!r}: send it in tools", "tool_choice")
    return found


def forced_grammar(functions: Tools, many: bool) -> str:
    """Return the Lark rule `answer` for calls of the given functions. The answer has one call. With `many`, it may have
    several calls.
    """
    return f'answer: "[" call {MORE_CALLS if many else ""} "]"\n' + call_rules(functions)


def call_rules(functions: Tools, key: str = "arguments", only_strict: bool = False) -> str:
    """Return the Lark rule `call` for one call of any of the functions as a JSON object, with the arguments under
    `key`. With `only_strict`, the arguments of functions that are not strict may be any object.
    """
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        head = json.dumps(json.dumps({"name": function["name"], key: 0})[:-2])
        is_free = only_strict and not function.get("strict")
        schema = {"type": "object"} if is_free else function.get("parameters") or NO_PARAMETERS
        rules.append(f'call_{i}: {head} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps({'x-guidance': JSON_SPACING, **schema})}")
    return "\n".join(rules) + "\n"
