"""Attention in numpy on the pages of a KVCache: full and sliding layers, without torch.

    python examples/numpy_engine.py

A small random model: each token has an embedding, each layer adds one attention over the tokens that it sees. `paged` reads and
writes K and V through block tables; `dense` computes the same without a cache. Both must choose the same tokens.
"""

import numpy as np

from kvloom.core import Field, KVCache, LayerSpec, PageGroup, PoolLayout, Sequence, Visibility

VOCABULARY, WIDTH, HEADS, DIM, WINDOW = 50, 16, 2, 8, 24
KV = (Field("k", (HEADS, DIM), "fp32"), Field("v", (HEADS, DIM), "fp32"))
FULL = LayerSpec("token", KV)
SLIDING = LayerSpec("token", KV, Visibility("sliding", WINDOW))
LAYERS = {"layer 0": SLIDING, "layer 1": SLIDING, "layer 2": FULL, "layer 3": SLIDING}

rng = np.random.default_rng(0)
EMBEDDING = rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
WEIGHTS = {name: rng.normal(size=(3, WIDTH, HEADS, DIM)).astype(np.float32) / 4 for name in LAYERS}


def attend(name: str, hidden: np.ndarray, positions: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention of new tokens at `positions` over K and V of all tokens up to the last: [tokens, heads, dim]."""
    q = np.einsum("tw,whd->thd", hidden, WEIGHTS[name][0])
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
    keys = np.arange(len(k))
    for row, position in enumerate(positions):  # the visibility rule is also the mask
        first = LAYERS[name].visibility.first_visible(int(position))
        scores[:, row, (keys < first) | (keys > position)] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(hidden), -1)


def key_value(name: str, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    k, v = np.einsum("tw,nwhd->nthd", hidden, WEIGHTS[name][1:])
    return k, v


def choose(hidden: np.ndarray) -> int:
    return int((EMBEDDING @ hidden[-1]).argmax())


class PagedModel:
    """The pool's bytes, and views of each group's pages."""

    def __init__(self, slabs: int) -> None:
        self.layout = PoolLayout.build(LAYERS)
        self.cache = KVCache(self.layout, slabs, model="numpy example")
        self.pool = np.zeros(slabs * self.layout.slab_bytes, np.uint8)
        self.copied = 0

    def pages(self, group: PageGroup) -> np.ndarray:
        """Pages of a group: [page id, layer in the page, k or v, token in the block, heads, dim], a view of the pool.

        A page holds `run_layers` layers, each `layer_bytes` long. What is inside is the engine's choice; here all K, then all V."""
        plain = self.pool.reshape(-1, group.page_stride)[:, : group.page_bytes].view(np.float32)
        return plain.reshape(-1, group.run_layers, 2, self.layout.block_tokens, HEADS, DIM)

    def run_copies(self) -> None:
        """Run the copies that the cache asks for, before the next write. Batches in order; the pages of one all at once."""
        for batch in self.cache.take_copies():
            pages = self.pool.reshape(-1, batch.page_stride)
            pages[batch.target] = pages[batch.source]
            self.copied += len(batch.source)

    def forward(self, sequence: Sequence, tokens: list[int]) -> np.ndarray | None:
        """Compute new tokens of a sequence; return the hidden state of the last. None: the pool is full."""
        if sequence.extend(len(tokens)):
            return None
        self.run_copies()
        block = self.layout.block_tokens
        positions = np.arange(sequence.length, sequence.length + len(tokens))
        everything = np.arange(positions[-1] + 1)
        hidden = EMBEDDING[tokens]
        for name, spec in LAYERS.items():
            group = next(group for group in self.layout.groups if name in group.layers)
            run, place = group.locate(
                name
            )  # the run has a block table; the layer is the place-th in its pages
            table, pages = sequence.table(group.index)[run], self.pages(group)
            k, v = key_value(name, hidden)
            pages[table[positions // block], place, 0, positions % block] = k
            pages[table[positions // block], place, 1, positions % block] = v
            # Blocks before the window have page 0, which holds zeros: the mask hides them.
            assert all(table[i] for i in spec.visibility.visible_blocks(int(positions[-1]), block))
            k = pages[table[everything // block], place, 0, everything % block]
            v = pages[table[everything // block], place, 1, everything % block]
            hidden = hidden + attend(name, hidden, positions, k, v)
        sequence.commit(tokens)
        return hidden

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], int]:
        """Return `count` new tokens, and the prompt tokens that were cached."""
        sequence = self.cache.open(self.cache.match(prompt))
        cached, made = sequence.length, list(prompt)
        while len(made) < len(prompt) + count:
            hidden = self.forward(
                sequence, made[sequence.length : sequence.length + 32]
            )  # prompts in chunks of 32
            if hidden is None:
                raise MemoryError("the pool is too small for this request")
            if sequence.length == len(made):
                made.append(choose(hidden))
        released = int((sequence.table(0) == 0).sum())
        print(
            f"{cached:3} of {len(prompt)} prompt tokens cached; {released} pages of {self.layout.groups[0].name} left the window"
        )
        sequence.close()  # its pages stay cached
        return made[len(prompt) :], cached


def dense(prompt: list[int], count: int) -> list[int]:
    """The same model without a cache: all tokens again for each new one."""
    made = list(prompt)
    for _ in range(count):
        hidden, positions = EMBEDDING[made], np.arange(len(made))
        for name in LAYERS:
            hidden = hidden + attend(name, hidden, positions, *key_value(name, hidden))
        made.append(choose(hidden))
    return made[len(prompt) :]


def main() -> None:
    model = PagedModel(slabs=60)
    for row in model.layout.table():
        print(
            f"{row['group']}: {row['layers']} layers, {row['pages_per_block']} pages a block of {row['page_bytes']} bytes"
        )
    system = rng.integers(0, VOCABULARY, 70).tolist()
    for _ in range(3):
        prompt = system + rng.integers(0, VOCABULARY, 9).tolist()
        answer, _ = model.generate(prompt, 20)
        assert answer == dense(prompt, 20)
    print(
        f"same tokens as without a cache; {model.copied} pages copied, because prompts share part of a block"
    )


if __name__ == "__main__":
    main()
