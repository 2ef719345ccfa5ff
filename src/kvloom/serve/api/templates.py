"""Renders chat templates with limits on characters and CPU seconds.

A short request can produce a huge output, because a template may repeat values of the request for every message. The
output is therefore counted while the template writes it, and rendering stops when a limit is exceeded. transformers
still renders the template. `limit_templates` adds only the counting, and does not change the result.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = [
    "RenderError",
    "limit_templates",
    "render_limits",
    "reserved_names",
]

STEPS = 64
"""Number of attribute reads and calls of a template between two readings of the clock."""
JINJA_NAMES = ("self", "super", "loop", "caller", "varargs", "kwargs", "context", "environment", "messages")

_thread = threading.local()


class RenderError(Exception):
    """Raised if a template exceeded a limit. The message states the limit."""


class _RenderBudget:
    """Limits the characters and the CPU time of rendering one chat template. Counts the characters and the time used so
    far."""

    __slots__ = ("_characters", "_end", "_limit", "_seconds", "_steps")

    def __init__(self, characters: int, seconds: float) -> None:
        self._limit, self._seconds = characters, seconds
        self._characters = self._steps = 0
        self._end = time.thread_time() + seconds

    def step(self) -> None:
        """Count one attribute read, call or operator of a template. Every STEPS steps, check the CPU time, and raise
        RenderError if it exceeds the limit. Only CPU time of this thread counts, so a busy machine causes no error.
        """
        self._steps += 1
        if self._steps % STEPS == 0 and time.thread_time() > self._end:
            raise RenderError(
                f"the chat template exceeds {self._seconds:g} seconds of CPU time: send fewer messages, or raise --template-seconds"
            )

    def add(self, characters: int) -> None:
        """Count characters of the output. Raises RenderError if the output exceeds a limit."""
        self._characters += characters
        self.check(self._characters)
        self.step()

    def check(self, characters: int) -> None:
        """Raise RenderError if a text of `characters` characters alone is longer than the limit of the whole output."""
        if characters > self._limit:
            raise RenderError(
                f"the chat template writes more than the limit of {self._limit:,} characters: shorten the messages"
            )


def _budget() -> _RenderBudget | None:
    return getattr(_thread, "work", None)


@contextmanager
def render_limits(characters: int, seconds: float) -> Iterator[None]:
    """Limit the templates that this thread renders, until the `with` block ends. If a template exceeds a limit, it
    raises RenderError.
    """
    _thread.work = _RenderBudget(characters, seconds)
    try:
        yield
    finally:
        _thread.work = None


def reserved_names(tokenizer: Any) -> frozenset[str]:
    """Return the names that chat_template_kwargs may not use: names of special tokens, of jinja, and of transformers'
    parameters and template functions.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    names = {
        *JINJA_NAMES,
        *tokenizer.special_tokens_map,
        *getattr(tokenizer, "SPECIAL_TOKENS_ATTRIBUTES", ()),
    }
    for function in (tokenizer.apply_chat_template, render_jinja_template):
        names |= set(inspect.signature(function).parameters)
    for template in _sources(tokenizer):
        compiled = _compiled(template)
        names |= set() if compiled is None else set(compiled.environment.globals)
    return frozenset(names)


def limit_templates(tokenizer: Any) -> None:
    """Make the tokenizer's chat templates obey `render_limits`. Outside `render_limits` they run without limits."""
    for source in _sources(tokenizer):
        compiled = _compiled(source)
        if compiled is None or hasattr(compiled, "kvloom_limited"):
            continue
        compiled.render = _limited(source, compiled)
        compiled.kvloom_limited = True
        if _compiled(source) is not compiled:
            raise RuntimeError(
                "this version of transformers compiles a chat template for every request: use 5.17 to 5.22"
            )


def _sources(tokenizer: Any) -> list[str]:
    """Return the texts of a tokenizer's chat templates."""
    found = getattr(tokenizer, "chat_template", None) or []
    return list(found.values()) if isinstance(found, dict) else [found] if isinstance(found, str) else []


def _compiled(source: str) -> Any | None:
    """Return the compiled template from the cache of transformers, or None for an invalid template. A request that
    renders an invalid template gets the error.
    """
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return _compile_jinja_template(source)
    except TemplateError:
        return None


def _limited(source: str, compiled: Any) -> Callable[..., str]:
    """Return a `render` method that counts characters and CPU time inside `render_limits`."""
    plain = compiled.render
    counted = _environment(compiled.environment).from_string(source)

    def render(*args: Any, **variables: Any) -> str:
        work = _budget()
        if work is None:
            return str(plain(*args, **variables))
        parts = []
        for part in counted.generate(*args, **variables):
            work.add(len(part))
            parts.append(part)
        return "".join(parts)

    return render


def _environment(original: Any) -> Any:
    """Return a copy of a template's environment with limits. The copy counts attribute reads, calls and operators, and
    checks the length of a text before the text is created.
    """
    from jinja2.filters import do_join, do_replace, make_attrgetter
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import pass_eval_context

    def check(characters: int) -> None:
        if (work := _budget()) is not None:
            work.check(characters)

    class Counted(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(("+", "*"))

        def concat(self, parts: Iterable[str]) -> str:
            found = list(parts)
            check(sum(map(len, found)))
            return "".join(found)

        def getattr(self, obj: Any, attribute: str) -> Any:
            if (work := _budget()) is not None:
                work.step()
            return super().getattr(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            if (work := _budget()) is not None:
                work.step()
            return super().getitem(obj, argument)

        def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
            if (work := _budget()) is not None:
                work.step()
                text = getattr(obj, "__self__", None)
                if isinstance(text, str):
                    work.check(_result_length(text, getattr(obj, "__name__", ""), [*args, *kwargs.values()]))
            return super().call(context, obj, *args, **kwargs)

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if (work := _budget()) is not None:
                work.step()
                if operator == "*":
                    work.check(_repeated_length(left, right))
                elif isinstance(left, str) and isinstance(right, str):
                    work.check(len(left) + len(right))
            return super().call_binop(context, operator, left, right)

    @pass_eval_context
    def join(context: Any, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        read: Callable[[Any], Any] = (
            (lambda item: item) if attribute is None else make_attrgetter(original, attribute)
        )
        found = [read(item) for item in value]
        check(sum(len(item) for item in found if isinstance(item, str)) + len(d) * len(found))
        return str(do_join(context, found, d))

    @pass_eval_context
    def replace(context: Any, s: str, old: str, new: str, count: int | None = None) -> str:
        if isinstance(s, str):
            check(_result_length(s, "replace", [old, new]))
        return str(do_replace(context, s, old, new, count))

    made: Any = object.__new__(Counted)
    made.__dict__.update(original.__dict__)
    made.filters = {**original.filters, "join": join, "replace": replace}
    return made


def _result_length(text: str, method: str, given: list[Any]) -> int:
    """Estimate the number of characters in the result of a method of str, for methods that can lengthen a text. Return
    0 for other methods.
    """
    if method == "replace" and len(given) >= 2 and all(isinstance(one, str) for one in given[:2]):
        return len(text) + text.count(given[0]) * max(0, len(given[1]) - len(given[0]))
    if method == "join" and given and isinstance(given[0], list | tuple):
        return sum(len(one) for one in given[0] if isinstance(one, str)) + len(text) * len(given[0])
    if method in ("center", "ljust", "rjust", "zfill"):
        return max((one for one in given if isinstance(one, int)), default=0)
    if method == "expandtabs":
        return text.count("\t") * max((one for one in given if isinstance(one, int)), default=8)
    return 0


def _repeated_length(left: Any, right: Any) -> int:
    for one, times in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(times, int):
            return len(one) * times
    return 0
