def rms_norm(
    x: int, weight: int, out: int, rows: int, dim: int, s_row: int, eps: float, one: float, /
) -> None: ...
def gated(x: int, out: int, rows: int, dim: int, tanh: bool, /) -> None: ...
def rotate(
    x: int, cos: int, sin: int, tokens: int, heads: int, half: int, s_token: int, s_head: int, /
) -> None: ...
def put(
    pages: int, new: int, page: int, place: int, tokens: int, heads: int, dim: int,
    s_page: int, s_place: int, s_head: int, s_token: int, s_from: int, /,
) -> None: ...  # fmt: skip
def decode(
    q: int, k: int, v: int, tables: int, firsts: int, lengths: int, out: int, begin: int, end: int,
    heads: int, kv_heads: int, dim: int, v_dim: int, block: int,
    s_q: tuple[int, ...], s_k: tuple[int, ...], s_v: tuple[int, ...], s_table: int, longest: int, scale: float, /,
) -> None: ...  # fmt: skip
def step(
    joined: int, cos: int, sin: int, out: int, begin: int, end: int, heads: int, scale: float,
    pages: tuple[int, ...], rows: tuple[int, ...], /,
) -> None: ...  # fmt: skip
def multiply(
    x: int, weight: int, out: int, rows: int, begin: int, end: int, dim: int, columns: int, add: bool, /
) -> None: ...
def compute(model: tuple[float, ...], tokens: tuple[int, ...], /) -> None: ...
def generate(model: tuple[float, ...], tokens: tuple[int, ...], /) -> None: ...
