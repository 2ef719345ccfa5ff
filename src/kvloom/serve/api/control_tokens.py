"""Encodes chats whose messages contain the text of a control token. Only control tokens that the template writes become
tokens.

Before rendering, a random mark is inserted into each control token in the texts of a request. After the template has
rendered the chat, the marks are removed. A control token that had a mark came from the request, and is encoded as text.

    content   go on <|system|>         marked   go on <593…|system|>
    prompt    <|user|>go on <|system|>          tokens   [user] g o … < | s y s t e m | >

Chats without such text are encoded directly.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable
from itertools import islice, pairwise
from typing import Any

from kvloom.serve.errors import bad_request

__all__ = ["MARK_CHARACTERS", "ControlTokens", "Encode"]

MARK_DIGITS = 32
"""Length of a mark. A mark consists of digits, because templates do not change digits (trim, tojson, upper)."""
FRAGMENT_DIGITS = 12
MAX_MARKS = 4096
"""Limit of control tokens in the texts of one request."""
MARK_CHARACTERS = MAX_MARKS * MARK_DIGITS
"""Number of characters that MAX_MARKS marks add to a rendered prompt, if the template writes each text only once."""
TRUSTED_ROLES = ("system", "developer", "assistant", "model")
"""In messages of these roles, only special tokens are encoded as text. Other added tokens, such as the markers of
reasoning and tool calls, stay tokens.
"""

Encode = Callable[[str], list[int]]


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the other added tokens that its chat template writes.
    With `any_template` all added tokens are control tokens, because the template of a request may write any of them.
    """

    def __init__(self, tokenizer: Any, any_template: bool = False) -> None:
        added = {
            token.content: token
            for token in tokenizer.added_tokens_decoder.values()
            if len(token.content) > 1
        }
        template = _template_text(tokenizer)
        special = {text for text, token in added.items() if token.special}
        written = {text for text in added if (any_template or text in template) and not text.isspace()}
        self._special, self._all = _Texts(special), _Texts(special | written)
        self._ids = {
            id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.content in self._all.texts
        }
        self._ids.discard(getattr(tokenizer, "unk_token_id", None))
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._aliases: dict[str, str] = {}
        self._encoder: Any = None
        self._real: dict[int, int] = {}
        self._control: set[int] = set()
        self._around: tuple[list[int], list[int]] = ([], [])
        if self._all.texts and backend is not None and hasattr(backend, "to_str"):
            self._build(tokenizer, backend, added)

    def mark(self, messages: list[dict[str, Any]], others: dict[str, Any]) -> tuple[Any, Any, str]:
        """Insert a new random mark into every control token in messages and in the other template variables. Return the
        changed messages, the changed variables, and the mark. The mark is "" if the texts contain no control token.

        In messages of trusted roles, only special tokens get marks. Raises ApiError if more than MAX_MARKS marks are
        needed.
        """
        trusted = [message.get("role") in TRUSTED_ROLES for message in messages]
        count = self._all.count(others)
        for known, message in zip(trusted, messages, strict=True):
            count += (self._special if known else self._all).count(message)
            if count > MAX_MARKS:
                raise _refused(f"they contain more than {MAX_MARKS:,} in all")
        if not count:
            return messages, others, ""
        mark = "".join(secrets.choice("0123456789") for _ in range(MARK_DIGITS))
        marked = [
            (self._special if known else self._all).marked(message, mark)
            for known, message in zip(trusted, messages, strict=True)
        ]
        return marked, self._all.marked(others, mark), mark

    def unmark(self, text: str, mark: str, encode: Encode, special: bool) -> tuple[str, str, Encode]:
        """Remove the marks from a rendered prompt. Return three values: the prompt, the text to encode, and the encoder
        for this text.

        If the prompt contains no marked control token, the text to encode is the prompt, and the encoder is `encode`.
        Otherwise, an alias replaces each control token that the template wrote. The returned encoder turns aliases into
        control tokens, and encodes all other text as plain text. With `special`, it also adds the tokens that the
        tokenizer puts around a prompt. Raises ApiError if the template has split a mark.
        """
        parts = text.split(mark)
        places, place = set(), 0
        for part in parts[:-1]:
            place += len(part)
            places.add(place)
        clean = "".join(parts)
        if mark[:FRAGMENT_DIGITS] in clean or mark[-FRAGMENT_DIGITS:] in clean:
            raise _refused("the chat template cuts one in two")
        forged = False
        written: list[str] = []
        end = aliases = 0
        for match in self._all.pattern.finditer(clean):
            if any(place in places for place in range(match.start() + 1, match.end())):
                forged = True
                continue
            written += [clean[end : match.start()], self._aliases.get(match[0], match[0])]
            end, aliases = match.end(), aliases + 1
        if not forged:
            return clean, clean, encode
        if self._encoder is None:
            raise _refused("its tokenizer cannot encode them as text")
        return clean, "".join([*written, clean[end:]]), self._encode_with(special)

    def _encode_with(self, special: bool) -> Encode:
        before, after = self._around if special else ([], [])

        def encode(text: str) -> list[int]:
            found = self._encoder.encode(text, add_special_tokens=False).ids
            wanted = sum(text.count(alias) for alias in self._aliases.values())
            if any(id_ in self._ids and id_ not in self._real for id_ in found) or wanted != sum(
                id_ in self._control for id_ in found
            ):
                raise _refused("its tokenizer cannot encode them as text")
            return [*before, *(self._real.get(id_, id_) for id_ in found), *after]

        return encode

    def _build(self, tokenizer: Any, backend: Any, added: dict[str, Any]) -> None:
        """Build a second tokenizer that does not recognise the texts of control tokens. The second tokenizer recognises
        secret aliases instead, which a request cannot contain.
        """
        from tokenizers import AddedToken, Tokenizer

        state = json.loads(backend.to_str())
        state["added_tokens"] = [
            token for token in state["added_tokens"] if token["content"] not in self._all.texts
        ]
        state["post_processor"] = state["truncation"] = state["padding"] = None
        made: Any = Tokenizer.from_str(json.dumps(state))
        texts = sorted(self._all.texts)
        self._aliases = {text: f"\U000f0000{secrets.token_hex(16)}\U000f0001" for text in texts}
        made.add_tokens([_alias(added[text], self._aliases[text], AddedToken) for text in texts])
        for text in [token["content"] for token in state["added_tokens"]]:
            self._real[made.token_to_id(text)] = backend.token_to_id(text)
        aliased = {
            made.token_to_id(alias): backend.token_to_id(text) for text, alias in self._aliases.items()
        }
        self._control = set(aliased)
        self._real |= aliased
        self._encoder = made
        bare, full = (list(tokenizer("a", add_special_tokens=some)["input_ids"]) for some in (False, True))
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                self._around = full[:start], full[start + len(bare) :]
                break


class _Texts:
    """The texts of control tokens, and the search for them. The time of a search grows with the length of the text."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = frozenset(texts)
        self.pattern = re.compile(_pattern(self.texts))
        self._search = re.compile(_pattern(self.texts), re.IGNORECASE)  # templates may change the case
        lower = {text.lower() for text in self.texts}
        self._beginnings = {text[:size] for text in lower for size in range(1, len(text))}
        self._ends = {text[size:] for text in lower for size in range(1, len(text))}
        self._longest = max(map(len, lower), default=0)
        self._first = {text[0] for text in lower}
        self._last = {text[-1] for text in lower}

    def count(self, value: Any) -> int:
        """Return how many marks must be inserted into a value: one for each control token. A text that starts or ends
        with a part of a control token also gets a mark, because the template could complete the token. The search in a
        text stops after about MAX_MARKS marks, so a result above MAX_MARKS may be too small.
        """
        if isinstance(value, str):
            return len(self._places(value))
        if isinstance(value, dict):
            return sum(self.count(key) + self.count(item) for key, item in value.items())
        return sum(map(self.count, value)) if isinstance(value, list) else 0

    def marked(self, value: Any, mark: str) -> Any:
        """Return a copy of `value` in which the mark is inserted into every control token."""
        if isinstance(value, str):
            cuts = [0, *self._places(value), len(value)]
            return mark.join(value[start:end] for start, end in pairwise(cuts))
        if isinstance(value, dict):
            return {self.marked(key, mark): self.marked(item, mark) for key, item in value.items()}
        return [self.marked(item, mark) for item in value] if isinstance(value, list) else value

    def _places(self, text: str) -> list[int]:
        """Return the positions in a text at which marks are inserted."""
        places = {match.start() + 1 for match in islice(self._search.finditer(text), MAX_MARKS + 1)}
        head, tail = text[: self._longest].lower(), text[-self._longest :].lower()
        if not self._last.isdisjoint(head) and any(
            head[:size] in self._ends for size in range(1, len(head) + 1)
        ):
            places.add(0)
        if not self._first.isdisjoint(tail):
            sizes = range(1, len(tail) + 1)
            places |= {len(text) - size + 1 for size in sizes if tail[-size:] in self._beginnings}
        return sorted(places)


def _pattern(texts: Iterable[str]) -> str:
    """Return a regular expression that matches any of `texts`. If several of them match at one position, it matches
    the longest. The expression is a trie, so a search does not try the texts one by one."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for letter in text:
            node = node.setdefault(letter, {})
        node[""] = {}

    def written(node: dict[str, Any]) -> str:
        branches = [re.escape(letter) + written(child) for letter, child in node.items() if letter]
        if not branches:
            return ""
        found = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
        return f"(?:{found})?" if "" in node else found

    return written(tree) or "(?!)"


def _alias(token: Any, alias: str, kind: Any) -> Any:
    """Return an added token with the text `alias` that treats spaces around it in the same way as `token`. `kind` is
    the class of added tokens."""
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return kind(alias, normalized=False, special=False, **flags)


def _template_text(tokenizer: Any) -> str:
    found = getattr(tokenizer, "chat_template", None) or ""
    return "\0".join(found.values()) if isinstance(found, dict) else str(found)


def _refused(why: str) -> Exception:
    return bad_request(
        f"messages: the texts contain control tokens of this model, and {why}: remove them", "messages"
    )
