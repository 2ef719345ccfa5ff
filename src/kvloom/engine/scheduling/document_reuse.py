"""Reuses the K and V of documents that prompts contain at any position.

    prompt            | text | document A ........ | text | document B ........ | question |
    computed          ======== ===                   ====== ===                   ==========
    copied                        ................             ................

The engine computes each document once, as a sequence that contains only the document. This sequence is cached, evicted
and offloaded like any other. A request that contains the document copies the K and V of this sequence to its own pages,
rotated to their positions in the prompt (`RotatedCopier`). The request computes the first tokens of each document
itself, so these tokens attend to the text before the document. The copies are approximate, because the tokens of the
document did not see the text before it. From the first copy on, the request therefore publishes no pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvloom.combinations import refused
from kvloom.core import CacheControl, KVCache, Match
from kvloom.engine.request import Document, Request

__all__ = ["DocumentReuse"]


class DocumentReuse:
    """Copies documents between the sequences of one cache. A request computes the first `share` (a fraction) of each
    document's tokens itself. `copy` has the arguments of `RotatedCopier.plan`, and copies tokens on all ranks after the
    pending copies of pages."""

    def __init__(self, cache: KVCache, copy: Callable[[int, int, int, int, int], None], share: float) -> None:
        self._cache, self._copy, self._share = cache, copy, share
        self._computing: dict[bytes, Request] = {}
        self.reused_tokens = 0
        """Number of tokens that were copied from documents."""
        self.missed = 0
        """Number of documents that a request computed, because their pages or free pages were missing."""

    def documents_of(self, request: Request) -> tuple[Document, ...]:
        """Return the documents of a new request that may be copied. Omits documents with less than one block of tokens
        to copy. Also omits a document at the start of the prompt, because the prefix cache finds it. Raises ValueError
        for a range outside the prompt, and for a request with images."""
        given = request.control.documents
        if given and given[-1][1] > len(request.prompt):
            raise ValueError(
                f"document [{given[-1][0]}, {given[-1][1]}) ends after the {len(request.prompt)} tokens of the prompt"
            )
        if given and request.images is not None:
            raise ValueError(refused("documents, images"))
        exact = (
            request.computes_all
            or request.offers_pages
            or request.awaits_peer is not None
            or request.activation is not None
            or not (request.control.store and request.control.read)
        )
        found = []
        for start, end in () if exact else given:
            end = min(end, len(request.prompt) - 1)
            document = Document(start, end, start + math.ceil(self._share * (end - start)))
            if start and end - document.copied_from >= self._cache.block_tokens:
                found.append(document)
        return tuple(found)

    def missing(self, request: Request) -> list[tuple[npt.NDArray[np.int32], CacheControl, bytes]]:
        """Return the documents of a request that must be computed first: tokens, cache control, and a key. Does not
        modify the cache."""
        found = {}
        for document in request.documents:
            match = self._match(request, document)
            if match.resume < document.end - document.start:
                ids = request.prompt_ids[document.start : document.end]
                control = self._control(request)
                found[self._cache.root_hash(control) + ids.tobytes()] = ids, control
        return [(ids, control, key) for key, (ids, control) in found.items()]

    def computing(self, key: bytes) -> Request | None:
        """Return the request that computes the document `key`. Return None if there is none, or if it has finished."""
        found = self._computing.get(key)
        return None if found is None or found.finish_reason is not None else found

    def set_computing(self, key: bytes, request: Request) -> None:
        """Record which request computes a document."""
        self._computing = {k: one for k, one in self._computing.items() if one.finish_reason is None}
        self._computing[key] = request

    @staticmethod
    def next_stop(request: Request) -> int | None:
        """Return the next position at which a step of the request must end, because a copy may follow there."""
        stops = (one.copied_from for one in request.documents if one.copied_from > request.computed)
        return min(stops, default=None)

    def copy(self, request: Request) -> None:
        """If the next tokens of a running request can be copied from a document, copy and commit them. If pages are
        missing, do nothing: the request then computes these tokens."""
        sequence, at = request.sequence, request.computed
        document = next((one for one in request.documents if one.copied_from <= at < one.end), None)
        if sequence is None or document is None or request.uncached or request.is_long:
            return
        match = self._match(request, document)
        count = document.start + match.resume - at
        if count < self._cache.block_tokens:
            self.missed += at == document.copied_from
            return
        source = self._cache.open(match, is_counted=False)
        try:
            if sequence.extend(count):
                self.missed += 1
                return
            self._copy(source.row, at - document.start, sequence.row, at, count)
        finally:
            source.close()
        sequence.stop_publishing()
        sequence.commit(request.prompt_ids[at : at + count])
        request.computed += count
        self.reused_tokens += count
        request.copied[document.start] = max(count, request.copied.get(document.start, 0))

    def _match(self, request: Request, document: Document) -> Match:
        """Match a document in the prefix cache. A match never contains the last token, so the next token of the prompt
        is appended to the document first."""
        ids = request.prompt_ids[document.start : document.end + 1]
        return self._cache.match(ids, replace(self._control(request), store=False))

    @staticmethod
    def _control(request: Request) -> CacheControl:
        """Return the cache control of a request's documents: the tenant, the salt and the adapter of the request."""
        return replace(request.control, session=None, retain=(), public_tokens=0, documents=())
