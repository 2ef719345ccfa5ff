"""The sampling parameters of a request, with the names of vLLM and the OpenAI API. This module has data and checks.
The sampler applies the parameters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal

from kvloom.combinations import refused

__all__ = ["GREEDY_BELOW", "MAX_LOGPROBS", "Finish", "SamplingParams", "StructureKind"]

GREEDY_BELOW = 1e-5
"""Below this temperature, the most likely token is selected."""
MAX_LOGPROBS = 1024
MAX_SAMPLES = 1024
INTEGERS = (
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
"""Parameters that are integers, or None."""

Finish = Literal["stop", "length", "cancelled", "no_room", "grammar", "slo"]
"""Why a request finished. "no_room": the whole pool is too small for it. "grammar": the grammar allows no token of
the vocabulary, or exceeded a limit on time or memory. "slo": the request could not meet its objective.
"""

StructureKind = Literal["json_schema", "regex", "grammar"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled, and when a request finishes.

    | concern   | parameters                                                                                |
    |-----------|-------------------------------------------------------------------------------------------|
    | length    | `max_tokens`; `min_tokens` (a request with fewer output tokens does not finish)           |
    | sampling  | `temperature` (0: greedy), `top_k` (0: all), `top_p`, `min_p`, `seed`                     |
    | logits    | `presence_penalty`, `frequency_penalty` (output only), `repetition_penalty` (prompt too), |
    |           | `logit_bias`                                                                              |
    | stops     | `stop` (texts, removed unless `include_stop_str_in_output`), `stop_token_ids`,            |
    |           | `ignore_eos`                                                                              |
    | tokens    | `allowed_token_ids`: only these tokens are sampled                                        |
    |           | `bad_token_ids`: token sequences that the output must not contain                         |
    |           | `timestamps`: the output has time stamps, by Whisper's rule                               |
    | samples   | `n`: number of samples to return: the best of `best_of` by cumulative log-probability, or |
    |           | the best of `beam_width` beams                                                            |
    | beams     | `length_penalty`; `early_stopping`: end as soon as `beam_width` texts have finished       |
    | logprobs  | `logprobs`: a count m; returns the log-probabilities of each sampled token, and of the    |
    |           | m most likely tokens at its position                                                      |
    |           | `prompt_logprobs`: the same for prompt tokens                                             |
    | embedding | `pooling`: return the mean, or the last, of the prompt's hidden states;                   |
    |           | needs `max_tokens` 1                                                                      |
    | structure | one of `json_schema`, `regex`, `grammar` (Lark notation)                                  |

    The same `seed` gives the same tokens, no matter which other requests run. Log-probabilities are those of the
    model, before temperature, penalties and masks.
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
    early_stopping: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    timestamps: bool = False
    pooling: Literal["mean", "last"] | None = None

    def __post_init__(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(str(text) for text in self.stop)
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        bias = {int(token): float(value) for token, value in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        if self.allowed_token_ids is not None:
            allowed = tuple(sorted({int(token) for token in self.allowed_token_ids}))
            object.__setattr__(self, "allowed_token_ids", allowed)
        bad = tuple(tuple(int(token) for token in tokens) for tokens in self.bad_token_ids)
        object.__setattr__(self, "bad_token_ids", bad)
        self._check_integers()
        self._check_lengths()
        self._check_sampling()
        self._check_logit_changes()
        self._check_samples()
        self._check_structure()
        self._check_pooling()

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def samples(self) -> int:
        """Number of samples to compute. `n` of them are returned."""
        return self.beam_width if self.beam_width > 1 else self.best_of or self.n

    @property
    def has_penalties(self) -> bool:
        """Whether any penalty is set."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def structure(self) -> tuple[StructureKind, str] | None:
        """The kind and text of the required structure, or None if there is none."""
        if self.json_schema is not None:
            schema = self.json_schema
            return "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
        if self.regex is not None:
            return "regex", self.regex
        return None if self.grammar is None else ("grammar", self.grammar)

    @property
    def needs_last_token(self) -> bool:
        """Whether the host needs each token before the next token can be sampled."""
        follows = any(len(tokens) > 1 for tokens in self.bad_token_ids)
        depends = self.has_penalties or self.structure is not None or self.timestamps
        return depends or self.beam_width > 1 or follows

    @property
    def wants_logprobs(self) -> bool:
        """Whether log-probabilities are computed, because they are requested or needed to rank samples."""
        return self.logprobs is not None or self.samples > self.n or self.beam_width > 1

    def _check_integers(self) -> None:
        for name in INTEGERS:
            value = getattr(self, name)
            if value is not None:
                try:
                    object.__setattr__(self, name, index(value))
                except TypeError:
                    raise ValueError(f"{name} {value!r} must be an integer") from None

    def _check_lengths(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens {self.max_tokens} must be at least 1")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} must be from 0 to max_tokens {self.max_tokens}")
        if not all(self.stops):
            raise ValueError(f"stop {self.stops!r} has an empty text: remove it")
        if any(token < 0 for token in self.stop_token_ids):
            raise ValueError(f"stop_token_ids {self.stop_token_ids} must not be negative")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise ValueError(
                    f"{name} {value} must be from 0 to {MAX_LOGPROBS}; 0 returns the sampled token only"
                )

    def _check_sampling(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(
                f"temperature {self.temperature} must be finite and at least 0; 0 selects the most likely token"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k {self.top_k} must not be negative; 0 keeps every token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p {self.min_p} must be from 0 to 1")

    def _check_logit_changes(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise ValueError(f"{name} {getattr(self, name)} must be from -2 to 2; 0 changes nothing")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty {self.repetition_penalty} must be finite and above 0; 1 changes nothing"
            )
        for token, value in self.logit_bias.items():
            if token < 0 or not -100 <= value <= 100:
                raise ValueError(
                    f"logit_bias {token}: {value} must map a token id to a value from -100 to 100"
                )
        allowed = self.allowed_token_ids
        if allowed is not None and (not allowed or allowed[0] < 0):
            raise ValueError("allowed_token_ids must have at least one token id, and none below 0")
        if any(not tokens or min(tokens) < 0 for tokens in self.bad_token_ids):
            raise ValueError("bad_token_ids must be sequences of token ids: remove empty and negative ones")

    def _check_samples(self) -> None:
        for name in ("n", "beam_width"):
            if not 1 <= getattr(self, name) <= MAX_SAMPLES:
                raise ValueError(f"{name} {getattr(self, name)} must be from 1 to {MAX_SAMPLES}")
        if self.best_of is not None and not self.n <= self.best_of <= MAX_SAMPLES:
            raise ValueError(f"best_of {self.best_of} must be from n {self.n} to {MAX_SAMPLES}")
        if self.beam_width > 1:
            self._check_beams()
        elif self.samples > 1 and self.greedy:
            raise ValueError(refused("samples, greedy", samples=self.samples, temperature=self.temperature))

    def _check_pooling(self) -> None:
        if self.pooling not in (None, "mean", "last"):
            raise ValueError(f"pooling {self.pooling!r} must be mean or last")
        if self.pooling is not None and (self.max_tokens > 1 or self.samples > 1 or self.structure):
            raise ValueError(refused("pooling, sampling"))

    def _check_beams(self) -> None:
        if not self.greedy:
            raise ValueError(refused("beams, sampling", width=self.beam_width, temperature=self.temperature))
        if self.n > self.beam_width:
            raise ValueError(f"n {self.n} must not exceed beam_width {self.beam_width}")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty {self.length_penalty} must be finite")
        masks = self.structure is not None or self.allowed_token_ids is not None or self.bad_token_ids
        changes = self.has_penalties or self.logit_bias or masks or self.timestamps
        if self.best_of is not None or changes or self.stops:
            raise ValueError(refused("beams, changed logits"))

    def _check_structure(self) -> None:
        given = [name for name in ("json_schema", "regex", "grammar") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(refused("structures", names=" and ".join(given)))
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
                raise ValueError(f"json_schema cannot be encoded as JSON: {error}") from None
            except RecursionError:
                raise ValueError("json_schema is nested too deeply: use fewer levels") from None
