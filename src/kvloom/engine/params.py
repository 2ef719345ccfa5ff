"""What a request may ask of its tokens, in the field's words. Data and its checks; how it is done is the sampler's."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

__all__ = ["GREEDY_BELOW", "MAX_LOGPROBS", "Finish", "SamplingParams", "StructureKind"]

GREEDY_BELOW = 1e-5
"""A temperature below this takes the likeliest token."""
MAX_LOGPROBS = 1024
MAX_SAMPLES = 1024
WHOLE = (
    "max_tokens",
    "min_tokens",
    "top_k",
    "seed",
    "n",
    "best_of",
    "beam_width",
    "logprobs",
    "prompt_logprobs",
)
"""Parameters that are whole numbers, or None."""

Finish = Literal["stop", "length", "cancelled", "no_room", "grammar"]
"""How a request ended; "no_room": the pool cannot hold it even alone; "grammar": the form it was asked for allows no
token of this vocabulary, or took more time or memory than a grammar may."""

StructureKind = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when to end.

    | of             | parameters                                                                                     |
    |----------------|------------------------------------------------------------------------------------------------|
    | length         | `max_tokens`, `min_tokens` (before which nothing ends it but `max_tokens`)                     |
    | drawing        | `temperature` (0: the likeliest), `top_k` (0: all), `top_p`, `min_p`, `seed`                   |
    | changed odds   | `presence_penalty`, `frequency_penalty` (over the output), `repetition_penalty` (prompt, too), `logit_bias` |
    | ends           | `stop` (texts, cut off unless `include_stop_str_in_output`), `stop_token_ids`, `ignore_eos`    |
    | many answers   | `n`, the best `n` of `best_of` by cumulative log-probability, or of `beam_width` beams (`length_penalty`) |
    | what is told   | `logprobs`: of each token, and of so many likeliest ones beside it; `prompt_logprobs`: of the prompt's |
    | form           | one of `json_schema`, `regex`, `grammar` (Lark's notation)                                     |

    `seed` makes a request's draws its own: the same seed gives the same tokens, whatever else runs. Log-probabilities
    are those of the model, before temperature, penalties and masks.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    n: int = 1
    best_of: int | None = None
    beam_width: int = 1
    length_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(str(text) for text in self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        bias = {int(token): float(value) for token, value in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        self._check_whole()
        self._check_lengths()
        self._check_drawing()
        self._check_odds()
        self._check_samples()
        self._check_structure()

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def samples(self) -> int:
        """How many answers are computed, of which `n` are given."""
        return self.beam_width if self.beam_width > 1 else self.best_of or self.n

    @property
    def penalised(self) -> bool:
        """Whether a token's odds hang on the tokens before it."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def structure(self) -> tuple[StructureKind, str] | None:
        """Which form the text must have: its kind, and what describes it."""
        if self.json_schema is not None:
            schema = self.json_schema
            return "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("grammar", self.grammar)

    @property
    def needs_last_token(self) -> bool:
        """Whether the host must have seen a token before the next can be chosen."""
        return self.penalised or self.structure is not None or self.beam_width > 1

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are computed: they are asked for, or answers are ranked by them."""
        return self.logprobs is not None or self.samples > self.n or self.beam_width > 1

    def _check_whole(self) -> None:
        for name in WHOLE:
            value = getattr(self, name)
            if value is not None:
                try:
                    object.__setattr__(self, name, index(value))
                except TypeError:
                    raise ValueError(f"{name} {value!r} must be a whole number") from None

    def _check_lengths(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must lie in 0 to max_tokens, {self.max_tokens}")
        if not all(self.stops):
            raise ValueError(f"stop {self.stops!r} must be texts of at least one character")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids {self.stop_token_ids} must not be negative")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(
                    f"{name} {value} must lie in 0 to {MAX_LOGPROBS}; 0 tells the token's own alone"
                )

    def _check_drawing(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature {self.temperature} must not be negative, nor infinite; 0 takes the likeliest token"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must not be negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must lie in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} must lie in [0, 1]")

    def _check_odds(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} {getattr(self, name)} must lie in [-2, 2]; 0 changes nothing")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty} must be above 0, and finite; 1 changes nothing"
            )
        for token, value in self.logit_bias.items():
            if token < 0 or not -100 <= value <= 100:
                raise ValueError(f"logit_bias {token}: {value} must map a token id to a value in [-100, 100]")

    def _check_samples(self) -> None:
        for name in ("n", "beam_width"):
            if not 1 <= getattr(self, name) <= MAX_SAMPLES:
                raise ValueError(f"{name} {getattr(self, name)} must lie in 1 to {MAX_SAMPLES}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_SAMPLES:
            raise ValueError(f"best_of {self.best_of} must lie in n, {self.n}, to {MAX_SAMPLES}")
        if self.beam_width > 1:
            self._check_beams()
        elif self.samples > 1 and self.greedy:
            raise ValueError(
                f"{self.samples} samples at temperature {self.temperature} would all be the same; "
                "give a temperature, or beam_width for the likeliest few"
            )

    def _check_beams(self) -> None:
        if not self.greedy:
            raise ValueError(
                f"beam_width {self.beam_width} takes the likeliest and draws nothing: set temperature to 0, "
                f"not {self.temperature}"
            )
        if self.n > self.beam_width:
            raise ValueError(f"n {self.n} must not exceed beam_width {self.beam_width}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty {self.length_penalty} must be finite")
        if self.best_of is not None or self.penalised or self.structure or self.stops or self.logit_bias:
            raise ValueError(
                "beam search goes by the model's own log-probabilities: best_of, penalties, logit_bias, stop texts and "
                "structured output do not go with beam_width"
            )

    def _check_structure(self) -> None:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} were given: the text can have one form")
        if isinstance(self.json_schema, str):
            try:
                json.loads(self.json_schema)
            except ValueError as error:
                raise ValueError(f"json_schema is not JSON: {error}") from None
            except RecursionError:
                raise ValueError("json_schema is nested too deeply: use fewer levels") from None
        elif self.json_schema is not None:
            try:
                json.dumps(self.json_schema)
            except (TypeError, ValueError) as error:
                raise ValueError(f"json_schema cannot be written as JSON: {error}") from None
            except RecursionError:
                raise ValueError("json_schema is nested too deeply: use fewer levels") from None
