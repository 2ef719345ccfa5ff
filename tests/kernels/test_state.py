"""Recurrent layers over packed rows: the plain path against a token-by-token recurrence and against Hugging Face's
functions, the Triton kernels against the plain path."""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional

from kvloom.kernels import state
from kvloom.kernels.state import (
    STEP_TOKENS,
    ColumnRuns,
    DeltaGates,
    StateRows,
    reference as state_reference,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PACKED = {"x", "dt", "b", "c", "z", "q", "k", "v", "g", "beta", "log_decay"}
Arguments = dict[str, Any]


# The rules: random arguments (in the order in which the launchers take them), and one row token by token.


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def decays(*shape: int) -> torch.Tensor:
    """Logs of decays: mostly slow, some fast, a few that forget everything."""
    sharp = torch.rand(*shape) < 0.05
    return -torch.where(sharp, 60.0, functional.softplus(2 * normal(*shape) - 1))


def conv_arguments(tokens: int, channels: int = 5, taps: int = 4, **options: Any) -> Arguments:
    return {
        "x": normal(tokens, channels),
        "weight": normal(channels, taps),
        "bias": normal(channels) if options.get("bias", True) else None,
        "silu": options.get("silu", True),
    }


def conv_row(p: Arguments, first: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.cat([first, p["x"].T], 1)
    columns, taps = first.shape[1], p["weight"].shape[1]
    out = torch.zeros_like(p["x"])
    for t in range(len(out)):
        end = columns + t + 1
        padded = functional.pad(inputs[:, max(0, end - taps) : end], (max(0, taps - end), 0))
        out[t] = (padded * p["weight"]).sum(1) + (0 if p["bias"] is None else p["bias"])
    return functional.silu(out) if p["silu"] else out, inputs[:, -columns:]


def linear_arguments(tokens: int, channels: int = 5) -> Arguments:
    return {"x": normal(tokens, channels), "log_decay": decays(tokens, channels)}


def linear_row(p: Arguments, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(p["x"])
    for t in range(len(out)):
        h = p["log_decay"][t].exp() * h + p["x"][t]
        out[t] = h
    return out, h


def mamba1_arguments(
    tokens: int, channels: int = 6, size: int = 4, groups: int = 1, **options: Any
) -> Arguments:
    return {
        "x": normal(tokens, channels),
        "dt": normal(tokens, channels) if options.get("softplus", True) else normal(tokens, channels).abs(),
        "a": -torch.exp(normal(channels, size)),
        "b": normal(tokens, groups, size),
        "c": normal(tokens, groups, size),
        "d": normal(channels) if options.get("d", True) else None,
        "z": normal(tokens, channels) if options.get("z", True) else None,
        "dt_bias": normal(channels) if options.get("dt_bias", True) else None,
        "softplus": options.get("softplus", True),
    }


def mamba1_row(p: Arguments, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(p["x"])
    channels, groups = out.shape[1], p["b"].shape[1]
    for t in range(len(out)):
        dt = p["dt"][t] + (0 if p["dt_bias"] is None else p["dt_bias"])
        dt = functional.softplus(dt) if p["softplus"] else dt
        b, c = (p[name][t].repeat_interleave(channels // groups, 0) for name in "bc")
        h = torch.exp(dt[:, None] * p["a"]) * h + (dt * p["x"][t])[:, None] * b
        y = (h * c).sum(1) + (0 if p["d"] is None else p["d"] * p["x"][t])
        out[t] = y if p["z"] is None else y * functional.silu(p["z"][t])
    return out, h


def mamba2_arguments(
    tokens: int, heads: int = 4, width: int = 3, groups: int = 2, size: int = 5, **options: Any
) -> Arguments:
    return {
        "x": normal(tokens, heads, width),
        "dt": 2 * normal(tokens, heads) if options.get("dt", True) else None,
        "a": -torch.exp(normal(heads)),
        "b": normal(tokens, groups, size),
        "c": normal(tokens, groups, size),
        "d": normal(heads) if options.get("d", True) else None,
        "z": normal(tokens, heads, width) if options.get("z", False) else None,
        "dt_bias": normal(heads) if options.get("dt_bias", True) else None,
        "softplus": True,
        "limits": options.get("limits", (0.0, float("inf"))),
    }


def mamba2_row(p: Arguments, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(p["x"])
    heads, groups = out.shape[1], p["b"].shape[1]
    for t in range(len(out)):
        dt = torch.ones(heads, dtype=out.dtype)
        if p["dt"] is not None:
            dt = functional.softplus(p["dt"][t] + (0 if p["dt_bias"] is None else p["dt_bias"]))
            dt = dt.clamp(*p["limits"])
        b, c = (p[name][t].repeat_interleave(heads // groups, 0)[:, None] for name in "bc")
        h = torch.exp(dt * p["a"])[:, None, None] * h + (dt[:, None] * p["x"][t])[..., None] * b
        y = (h * c).sum(2) + (0 if p["d"] is None else p["d"][:, None] * p["x"][t])
        out[t] = y if p["z"] is None else y * functional.silu(p["z"][t])
    return out, h


def delta_arguments(
    tokens: int, key_heads: int = 2, heads: int = 4, dk: int = 5, dv: int = 6, **options: Any
) -> Arguments:
    normalise = options.get("normalise", True)
    q, k = normal(tokens, key_heads, dk), normal(tokens, key_heads, dk)
    if options.get("alike"):
        k = k[:1] + 0.01 * k
    gate = options.get("gate", "head")
    shape = (tokens, heads, dk) if gate == "channel" else (tokens, heads)
    return {
        "q": q,
        "k": k if normalise else functional.normalize(k, dim=-1),
        "v": normal(tokens, heads, dv),
        "g": decays(*shape) if gate else None,
        "beta": torch.rand(tokens, heads, dtype=torch.float64) if options.get("beta", True) else None,
        "scale": options.get("scale", dk**-0.5),
        "normalise": normalise,
    }


def delta_row(p: Arguments, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.zeros_like(p["v"])
    heads, key_heads = out.shape[1], p["q"].shape[1]
    for t in range(len(out)):
        q, k = (p[name][t].repeat_interleave(heads // key_heads, 0) for name in "qk")
        if p["normalise"]:
            q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
        if p["g"] is not None:
            g = p["g"][t].exp()
            s = s * (g[:, :, None] if g.dim() == 2 else g[:, None, None])
        beta = 1 if p["beta"] is None else p["beta"][t][:, None]
        correction = beta * (p["v"][t] - (s * k[..., None]).sum(1))
        s = s + k[..., None] * correction[:, None]
        out[t] = (s * q[..., None]).sum(1) * p["scale"]
    return out, s


@dataclass(frozen=True)
class Rule:
    name: str
    kernels: str
    arguments: Callable[..., Arguments]
    row: Callable[[Arguments, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]

    def shape(self, p: Arguments) -> tuple[int, ...]:
        """What a page holds."""
        if self.name == "causal_conv":
            return p["weight"].shape[0], p["weight"].shape[1]
        if self.name == "linear_scan":
            return (p["x"].shape[1],)
        if self.name == "delta_rule":
            return p["v"].shape[1], p["k"].shape[2], p["v"].shape[2]
        return *p["x"].shape[1:], p["b"].shape[2]

    def reference(self, p: Arguments, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
        return getattr(state_reference, self.name)(*p.values(), states, rows)

    def triton(self, p: Arguments, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
        module = importlib.import_module(f"kvloom.kernels.state.{self.kernels}")
        return getattr(module, self.name)(*p.values(), states, rows)

    def public(self, p: Arguments, states: torch.Tensor, rows: StateRows) -> torch.Tensor:
        return getattr(state, self.name)(**p, states=states, rows=rows)


RULES = {
    "conv": Rule("causal_conv", "triton_conv", conv_arguments, conv_row),
    "linear": Rule("linear_scan", "triton_scan", linear_arguments, linear_row),
    "mamba1": Rule("mamba1_scan", "triton_scan", mamba1_arguments, mamba1_row),
    "mamba2": Rule("mamba2_scan", "triton_ssd", mamba2_arguments, mamba2_row),
    "delta": Rule("delta_rule", "triton_delta", delta_arguments, delta_row),
}
PLAIN_CASES: list[tuple[str, Arguments]] = [
    ("conv", {}),
    ("conv", {"taps": 2, "bias": False}),
    ("conv", {"taps": 3, "silu": False}),
    ("conv", {"taps": 7, "silu": False}),
    ("linear", {}),
    ("mamba1", {}),
    ("mamba1", {"d": False, "z": False, "dt_bias": False, "softplus": False}),
    ("mamba1", {"groups": 2}),
    ("mamba2", {}),
    ("mamba2", {"dt": False, "groups": 4, "d": False}),
    ("mamba2", {"z": True, "limits": (0.5, 1.5), "groups": 1}),
    ("delta", {}),
    ("delta", {"normalise": False, "gate": None}),
    ("delta", {"beta": False, "heads": 2, "scale": 1.0}),
    ("delta", {"gate": "channel", "heads": 2}),
    ("delta", {"alike": True, "gate": None}),
]
LENGTHS = [
    [1, 1, 1, 1, 1],
    [3, 0, 8, 1, 2, 5],
    [0, 0],
    [65, 1, 0, 64, 130, 3, 17],
    [200],
]


def case_name(value: Any) -> str:
    if isinstance(value, dict):
        return "-".join(f"{k}={v}" for k, v in value.items()) or "plain"
    return str(value)


# Pages and rows.


def pages(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A view with a page stride of its own. Page 0 and the bytes between pages are NaN: no kernel may read them."""
    size = torch.Size(shape).numel()
    flat = torch.full((count, size + 5), torch.nan, dtype=dtype)
    view = flat[:, 3 : 3 + size].view(count, *shape)
    view[1:] = torch.randn(count - 1, *shape, dtype=torch.float64).to(dtype)
    return view


def move(value: Any, dtype: torch.dtype | None = None) -> Any:
    """To the device; to `dtype` where it floats."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.to(DEVICE, dtype if value.is_floating_point() else None)


def rows_of(lengths: list[int], kinds: str = "ucfnd") -> tuple[StateRows, int]:
    """Rows whose kinds are: u(pdate in place), c(opy to another page), f(resh page), n(o page to read from),
    d(rop the last state). Also how many pages they need."""
    read, write, fresh = [], [], []
    for index in range(len(lengths)):
        kind, page = kinds[index % len(kinds)], 2 * index + 1
        read.append(0 if kind == "n" else page)
        write.append({"c": page + 1, "d": 0}.get(kind, page))
        fresh.append(kind == "f")
    starts = torch.tensor(
        [sum(lengths[:i]) for i in range(len(lengths) + 1)], dtype=torch.int32, device=DEVICE
    )
    slots = [torch.tensor(part, dtype=torch.int32, device=DEVICE) for part in (read, write)]
    return StateRows(starts, *slots, max(lengths), torch.tensor(fresh, device=DEVICE)), 2 * len(lengths) + 1


def part_of(p: Arguments, part: slice) -> Arguments:
    """The arguments for a stretch of the tokens."""
    return {k: v[part] if k in PACKED and v is not None else v for k, v in p.items()}


def token_by_token(
    rule: Rule, p: Arguments, states: torch.Tensor, rows: StateRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and pages as the rule's recurrence gives them, row by row, in float64 on the CPU."""
    p = {k: v.cpu().double() if isinstance(v, torch.Tensor) else v for k, v in p.items()}
    after = states.cpu().double().clone()
    before, outputs, starts = after.clone(), [], rows.starts.tolist()
    for row, (read, write) in enumerate(zip(rows.read.tolist(), rows.write.tolist(), strict=True)):
        blank = read == 0 or (rows.fresh is not None and bool(rows.fresh[row]))
        first = torch.zeros_like(before[0]) if blank else before[read]
        out, last = rule.row(part_of(p, slice(starts[row], starts[row + 1])), first)
        outputs.append(out)
        if write:
            after[write] = last
    return torch.cat(outputs), after


def same(got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(
        got.cpu().double(), expected.cpu().double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


# The plain path.


@pytest.mark.parametrize("lengths", LENGTHS, ids=case_name)
@pytest.mark.parametrize(("name", "options"), PLAIN_CASES, ids=case_name)
def test_plain_is_the_recurrence(name: str, options: Arguments, lengths: list[int]) -> None:
    torch.manual_seed(len(lengths))
    rule, (rows, count) = RULES[name], rows_of(lengths)
    p = {k: move(v) for k, v in rule.arguments(sum(lengths), **options).items()}
    states = move(pages(count, rule.shape(p), torch.float64))
    expected, after = token_by_token(rule, p, states, rows)
    got = rule.public(p, states, rows)
    same(got, expected, 1e-9)
    same(states, after, 1e-9)


@pytest.mark.parametrize("name", RULES)
def test_a_prompt_in_pieces_is_the_prompt(name: str) -> None:
    """The state carried in its page stands for all that came before it."""
    torch.manual_seed(3)
    rule, length = RULES[name], 150
    p = {k: move(v) for k, v in rule.arguments(length).items()}
    states = move(pages(3, rule.shape(p), torch.float64))
    slot = torch.tensor([1], device=DEVICE)
    new = torch.tensor([True], device=DEVICE)
    whole = rule.public(
        p, states, StateRows(torch.tensor([0, length], device=DEVICE), slot, slot, length, new)
    )
    cuts = [0, 70, 71, 73, 137, 150]
    pieces = []
    for first, last in pairwise(cuts):
        starts = torch.tensor([0, last - first], device=DEVICE)
        rows = StateRows(starts, slot + 1, slot + 1, last - first, new if first == 0 else None)
        pieces.append(rule.public(part_of(p, slice(first, last)), states, rows))
    same(torch.cat(pieces), whole, 1e-9)
    same(states[2], states[1], 1e-9)


def test_a_conv_state_may_keep_one_column_less_than_the_taps() -> None:
    torch.manual_seed(0)
    rows, count = rows_of([5, 1, 2, 0, 9])
    p = {k: move(v) for k, v in conv_arguments(17, taps=4).items()}
    states = move(pages(count, (5, 3), torch.float64))
    expected, after = token_by_token(RULES["conv"], p, states, rows)
    same(RULES["conv"].public(p, states, rows), expected, 1e-12)
    same(states, after, 1e-12)


def test_mamba1_without_groups_takes_two_dimensions() -> None:
    torch.manual_seed(0)
    rows, count = rows_of([4])
    p = {k: move(v) for k, v in mamba1_arguments(4).items()}
    states = move(pages(count, (6, 4), torch.float64))
    twin = states.clone()
    flat = p | {"b": p["b"][:, 0], "c": p["c"][:, 0]}
    same(RULES["mamba1"].public(flat, states, rows), RULES["mamba1"].public(p, twin, rows), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", RULES)
def test_public_functions_keep_dtypes_and_add_up_in_float32(name: str, dtype: torch.dtype) -> None:
    """On a GPU this is the way to the Triton kernels."""
    check_dtype(RULES[name], RULES[name].public, dtype, torch.float32)


def check_dtype(rule: Rule, run: Callable[..., torch.Tensor], dtype: torch.dtype, kept: torch.dtype) -> None:
    torch.manual_seed(1)
    rows, count = rows_of([70, 1, 3])
    p = {k: move(v, dtype) for k, v in rule.arguments(74).items()}
    states = move(pages(count, rule.shape(p), kept))
    expected, after = token_by_token(rule, p, states, rows)
    got = run(p, states, rows)
    assert got.dtype == dtype
    assert states.dtype == kept
    unit = torch.finfo(dtype).eps
    assert distance(got, expected) < max(2 * unit, 1e-4)
    # A device cuts the factors of fp16 rows to tf32, which is as coarse as fp16.
    assert distance(states[1:], after[1:]) < max(2 * unit, torch.finfo(kept).eps, 1e-4)


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.cpu().double() - expected.cpu()).norm() / expected.cpu().norm())


# Hugging Face's own functions, where they are right.


def dense(p: Arguments, batch: int) -> Arguments:
    return {k: v.unflatten(0, (batch, -1)) if k in PACKED and v is not None else v for k, v in p.items()}


def equal_rows(batch: int, length: int) -> StateRows:
    slots = torch.arange(1, batch + 1, device=DEVICE)
    return StateRows(torch.arange(0, batch * length + 1, length, device=DEVICE), slots, slots, length)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("carried", [False, True])
def test_delta_rule_as_in_qwen3_next(form: str, carried: bool) -> None:
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    torch.manual_seed(0)
    batch, length = 2, 75
    p = {k: move(v, torch.float32) for k, v in delta_arguments(batch * length, key_heads=4, dk=8).items()}
    states = torch.randn(batch + 1, 4, 8, 6, device=DEVICE)
    first = states[1:].clone() if carried else None
    if not carried:
        states[1:] = 0
    theirs = getattr(module, f"torch_{form}_gated_delta_rule")
    q, k, v, g, beta = (dense(p, batch)[name] for name in ("q", "k", "v", "g", "beta"))
    expected, last = theirs(
        q, k, v, g=g, beta=beta, initial_state=first, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    got = RULES["delta"].reference(p, states, equal_rows(batch, length))
    same(got, expected.flatten(0, 1), 2e-5)
    same(states[1:], last, 2e-5)


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
def test_delta_rule_as_in_kimi_linear(form: str) -> None:
    module = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    torch.manual_seed(0)
    batch, length = 2, 75
    options = {"key_heads": 3, "heads": 3, "dk": 8, "gate": "channel"}
    p = {k: move(v, torch.float32) for k, v in delta_arguments(batch * length, **options).items()}
    states = torch.randn(batch + 1, 3, 8, 6, device=DEVICE)
    q, k, v, g, beta = (dense(p, batch)[name] for name in ("q", "k", "v", "g", "beta"))
    expected, last = getattr(module, f"{form}_kimi_delta_attention")(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=states[1:].clone(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = RULES["delta"].reference(p, states, equal_rows(batch, length))
    same(got, expected.flatten(0, 1), 2e-5)
    same(states[1:], last, 2e-5)


def test_mamba2_prefill_and_steps_as_in_transformers() -> None:
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    batch, length = 2, 77
    p = {k: move(v, torch.float32) for k, v in mamba2_arguments(batch * length, limits=(0.1, 2.0)).items()}
    states = torch.randn(batch + 1, 4, 3, 5, device=DEVICE)
    cut = dense(p, batch)
    expected, last = module.mamba2_chunk_scan(
        *(cut[name] for name in ("x", "dt", "a", "b", "c")),
        chunk_size=16,
        D=p["d"],
        dt_bias=p["dt_bias"],
        initial_states=states[1:].clone(),
        dt_softplus=True,
        dt_limit=p["limits"],
        return_final_states=True,
    )
    got = RULES["mamba2"].reference(p, states, equal_rows(batch, length))
    same(got, expected.flatten(0, 1), 2e-5)
    same(states[1:], last, 2e-5)
    step = part_of(p, slice(0, batch)) | {"limits": (0.0, float("inf"))}
    theirs = module.mamba2_selective_state_update(
        last,
        step["x"],
        step["dt"][..., None].expand(-1, -1, 3),
        p["a"][:, None, None].expand(-1, 3, 5),
        step["b"],
        step["c"],
        p["d"][:, None].expand(-1, 3),
        dt_bias=p["dt_bias"][:, None].expand(-1, 3),
        dt_softplus=True,
    )
    same(
        RULES["mamba2"].reference(step, states, StateRows.decode(torch.arange(1, batch + 1, device=DEVICE))),
        theirs,
        2e-5,
    )
    same(states[1:], last, 2e-5)


def test_mamba1_prefill_from_zeros_and_steps_as_in_transformers() -> None:
    """Their prefill knows no first state, so only one from zeros can be compared; ours with one is tested above."""
    module = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    torch.manual_seed(0)
    batch, length = 2, 40
    p = {k: move(v, torch.float32) for k, v in mamba1_arguments(batch * length).items()}
    states = torch.zeros(batch + 1, 6, 4, device=DEVICE)
    cut = dense(p, batch)
    x, dt, z = (cut[name].transpose(1, 2) for name in ("x", "dt", "z"))
    b, c = (cut[name][:, :, 0].transpose(1, 2) for name in "bc")
    expected, last = module.mamba_selective_scan(
        x,
        dt,
        p["a"],
        b,
        c,
        D=p["d"],
        z=z,
        delta_bias=p["dt_bias"],
        delta_softplus=True,
        return_last_state=True,
    )
    got = RULES["mamba1"].reference(p, states, equal_rows(batch, length))
    same(got, expected.transpose(1, 2).flatten(0, 1), 2e-5)
    same(states[1:], last, 2e-5)
    step = part_of(p, slice(0, batch))
    theirs = module.mamba_selective_state_update(
        last,
        step["x"],
        step["dt"],
        p["a"],
        step["b"][:, 0],
        step["c"][:, 0],
        p["d"],
        z=step["z"],
        dt_bias=p["dt_bias"],
        dt_softplus=True,
    )
    rows = StateRows.decode(torch.arange(1, batch + 1, device=DEVICE))
    same(RULES["mamba1"].reference(step, states, rows), theirs, 2e-5)
    same(states[1:], last, 2e-5)


def test_conv_as_in_transformers() -> None:
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    p = {k: move(v, torch.float32) for k, v in conv_arguments(2 * 9).items()}
    states = torch.zeros(3, 5, 4, device=DEVICE)
    x = dense(p, 2)["x"].transpose(1, 2)
    expected = module.causal_conv1d_fn(x, p["weight"], p["bias"], activation="silu")
    same(RULES["conv"].reference(p, states, equal_rows(2, 9)), expected.transpose(1, 2).flatten(0, 1), 1e-5)
    same(states[1:], x[:, :, -4:], 0)
    kept, step = states[1:].clone(), part_of(p, slice(0, 2))
    theirs = module.causal_conv1d_update(step["x"][..., None], kept, p["weight"], p["bias"], "silu")
    rows = StateRows.decode(torch.tensor([1, 2], device=DEVICE))
    same(RULES["conv"].reference(step, states, rows), theirs[..., 0], 1e-5)
    same(states[1:], kept, 0)


def test_linear_scan_as_in_recurrent_gemma() -> None:
    module = pytest.importorskip("transformers.models.recurrent_gemma.modeling_recurrent_gemma")
    torch.manual_seed(0)
    p = {k: move(v, torch.float32) for k, v in linear_arguments(2 * 9).items()}
    states = torch.randn(3, 5, device=DEVICE)
    cut = dense(p, 2)
    expected, last = module.RecurrentGemmaRglru._rnn_scan(
        None,
        cut["x"],
        cut["log_decay"].exp(),
        torch.zeros(2, 9, 1, dtype=torch.bool, device=DEVICE),
        states[1:].clone(),
    )
    same(RULES["linear"].reference(p, states, equal_rows(2, 9)), expected.flatten(0, 1), 1e-5)
    same(states[1:], last, 1e-5)


def test_lightning_attention_is_a_mamba2_scan() -> None:
    """S = exp(-slope) S + k vᵀ, y = Sᵀ q: as MiniMax decodes, its state turned over."""
    torch.manual_seed(0)
    tokens, heads, dim = 70, 3, 4
    q, k, v = (torch.randn(tokens, heads, dim, dtype=torch.float64, device=DEVICE) for _ in range(3))
    slope = torch.tensor([0.5, 0.1, 0.02], dtype=torch.float64, device=DEVICE)
    states = torch.randn(2, heads, dim, dim, dtype=torch.float64, device=DEVICE)
    s, expected = states[1].transpose(1, 2), []
    for t in range(tokens):
        s = torch.exp(-slope)[:, None, None] * s + k[t][..., None] * v[t][:, None]
        expected.append((q[t][:, None] @ s)[:, 0])
    got = state.mamba2_scan(v, None, -slope, k, q, states, equal_rows(1, tokens))
    same(got, torch.stack(expected), 1e-9)
    same(states[1].transpose(1, 2), s, 1e-9)


# The Triton kernels.

TRITON_CASES: list[tuple[str, Arguments]] = [
    ("conv", {}),
    ("conv", {"taps": 2, "bias": False, "channels": 37}),
    ("conv", {"taps": 3, "silu": False, "channels": 130}),
    ("conv", {"taps": 6, "silu": False}),
    ("linear", {"channels": 33}),
    ("mamba1", {}),
    ("mamba1", {"channels": 40, "size": 16, "z": False}),
    ("mamba1", {"d": False, "dt_bias": False, "softplus": False}),
    ("mamba1", {"groups": 2, "size": 3}),
    ("mamba2", {}),
    ("mamba2", {"dt": False, "groups": 4, "d": False, "width": 17, "size": 70}),
    ("mamba2", {"z": True, "limits": (0.5, 1.5), "heads": 17, "groups": 1, "width": 2}),
    ("mamba2", {"width": 70, "heads": 2, "groups": 1, "size": 16}),
    ("delta", {}),
    ("delta", {"normalise": False, "gate": None, "dk": 17, "dv": 70, "heads": 2}),
    ("delta", {"beta": False, "heads": 2, "scale": 1.0, "dk": 16, "dv": 16}),
    ("delta", {"gate": "channel", "heads": 2}),
    ("delta", {"alike": True, "gate": None}),
    ("delta", {"key_heads": 1, "heads": 1, "dk": 130}),
]
TRITON_LENGTHS = [
    [1, 1, 1, 1, 1, 1],
    [3, 0, 8, 1, 2, 5],
    [130, 1, 0, 64, 9],
]


@pytest.mark.parametrize("lengths", TRITON_LENGTHS, ids=case_name)
@pytest.mark.parametrize(("name", "options"), TRITON_CASES, ids=case_name)
@pytest.mark.few(15)
def test_triton_is_the_plain_path(name: str, options: Arguments, lengths: list[int]) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(len(lengths))
    rule, (rows, count) = RULES[name], rows_of(lengths)
    p = {k: move(v, torch.float32) for k, v in rule.arguments(sum(lengths), **options).items()}
    states = move(pages(count, rule.shape(p), torch.float32))
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in p.items()}
    after = states.double()
    expected = rule.reference(exact, after, rows)
    got = rule.triton(p, states, rows)
    same(got, expected, 2e-4)
    same(states, after, 2e-4)


@pytest.mark.parametrize(("name", "options"), TRITON_CASES, ids=case_name)
@pytest.mark.slow
def test_triton_stores_the_state_before_a_draft(name: str, options: Arguments) -> None:
    """Outputs are those of whole rows. Stored states are those after the first tokens of each row."""
    pytest.importorskip("triton")
    torch.manual_seed(5)
    lengths, stored = [3, 1, 9, 5, 17], [1, 1, 4, 5, 12]
    rule, (rows, count) = RULES[name], rows_of(lengths)
    p = {k: move(v, torch.float32) for k, v in rule.arguments(sum(lengths), **options).items()}
    states = move(pages(count, rule.shape(p), torch.float32))
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in p.items()}
    expected = rule.reference(exact, states.double(), rows)
    after, (short, _) = states.double(), rows_of(stored)
    starts = rows.starts.tolist()
    first = [i for start, n in zip(starts, stored, strict=False) for i in range(start, start + n)]
    rule.reference(
        {k: v[first] if k in PACKED and v is not None else v for k, v in exact.items()}, after, short
    )
    got = rule.triton(p, states, replace(rows, stored=torch.tensor(stored, device=DEVICE)))
    same(got, expected, 2e-4)
    same(states, after, 2e-4)


@pytest.mark.parametrize(
    ("name", "options"), [("linear", {}), ("mamba1", {}), ("mamba1", {"groups": 3})], ids=case_name
)
def test_triton_cuts_long_rows_in_time(
    name: str, options: Arguments, monkeypatch: pytest.MonkeyPatch
) -> None:
    triton_scan = pytest.importorskip("kvloom.kernels.state.triton_scan")
    monkeypatch.setattr(triton_scan, "CHUNK", 16)
    walked = []
    monkeypatch.setattr(triton_scan, "pass_kernel", Spy(triton_scan.pass_kernel, walked))
    test_triton_is_the_plain_path(name, options, [65, 1, 0, 48, 3])
    assert len(walked) == 1


class Spy:
    """A kernel that notes its launches."""

    def __init__(self, kernel: Any, seen: list[Any]) -> None:
        self.kernel, self.seen = kernel, seen

    def __getitem__(self, grid: Any) -> Any:
        self.seen.append(grid)
        return self.kernel[grid]


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.slow
def test_triton_in_short_dtypes(name: str, dtype: torch.dtype, kept: torch.dtype) -> None:
    pytest.importorskip("triton")
    check_dtype(RULES[name], RULES[name].triton, dtype, kept)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("longest", [1, 1000])
def test_triton_leaves_unused_pages_unchanged(name: str, longest: int) -> None:
    """Inputs that are slices of wider rows, padding on slot 0, rows far shorter than `longest`, int64 slots, and
    tokens and pages of no row."""
    pytest.importorskip("triton")
    torch.manual_seed(2)
    rule, tokens = RULES[name], 5
    p = {k: move(v, torch.float32) for k, v in rule.arguments(tokens + 2).items()}
    for key in PACKED & p.keys():
        if p[key] is not None:
            p[key] = torch.cat([torch.full_like(p[key], torch.nan), p[key]], -1)[..., p[key].shape[-1] :]
    states = move(pages(9, rule.shape(p), torch.float32))
    slots = torch.tensor([3, 0, 5, 0, 8], device=DEVICE)
    rows = StateRows(torch.arange(tokens + 1, device=DEVICE), slots, slots, longest)
    real = part_of(p, slice(0, tokens))
    after = states.double()
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in real.items()}
    expected = rule.reference(exact, after, rows)
    got = rule.triton(p, states, rows)[:tokens]
    same(got, expected, 2e-4)
    same(states, after, 2e-4)
    assert states[0].isnan().all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RULES)
def test_triton_on_random_shapes(name: str, seed: int) -> None:
    pytest.importorskip("triton")
    dice = random.Random(f"{name}{seed}")
    lengths = [
        dice.choice([0, 1, 2, dice.randint(1, 9), dice.randint(10, 90)]) for _ in range(dice.randint(1, 5))
    ]
    groups = dice.choice([1, 2, 3])
    options: dict[str, Arguments] = {
        "conv": {"channels": dice.randint(1, 200), "taps": dice.randint(2, 5)},
        "linear": {"channels": dice.randint(1, 300)},
        "mamba1": {"channels": groups * dice.randint(1, 12), "size": dice.randint(1, 20), "groups": groups},
        "mamba2": {
            "heads": groups * dice.randint(1, 2),
            "groups": groups,
            "width": dice.randint(1, 40),
            "size": dice.randint(1, 40),
        },
        "delta": {
            "key_heads": groups,
            "heads": groups * dice.randint(1, 2),
            "dk": dice.randint(1, 40),
            "dv": dice.randint(1, 40),
        },
    }
    test_triton_is_the_plain_path(name, options[name], lengths)


@pytest.mark.parametrize("lengths", [[1, 3, 1], [40, 1, 0, 18]], ids=case_name)
def test_triton_reads_channels_where_they_are(lengths: list[int]) -> None:
    """A convolution over columns that other columns divide, against one over a copy of its columns."""
    triton_conv = pytest.importorskip("kvloom.kernels.state.triton_conv")
    torch.manual_seed(3)
    rows, count = rows_of(lengths)
    wide = torch.randn(sum(lengths), 200, device=DEVICE)
    runs = ColumnRuns(torch.tensor([144, 16, 96], dtype=torch.int32, device=DEVICE), 32)
    weight, bias = torch.randn(96, 4, device=DEVICE), torch.randn(96, device=DEVICE)
    states = move(pages(count, (96, 4), torch.float32))
    after, columns = states.clone(), [*range(144, 176), *range(16, 48), *range(96, 128)]
    expected = state_reference.causal_conv(wide[:, columns], weight, bias, True, after, rows)
    same(triton_conv.causal_conv(wide, weight, bias, True, states, rows, runs), expected, 2e-4)
    same(states, after, 2e-4)
    with pytest.raises(ValueError, match="3 runs of 16 columns do not have the 96 channels"):
        state.causal_conv(wide, weight, states, rows, bias, True, ColumnRuns(runs.first, 16))


@pytest.mark.parametrize("lengths", [[1, 3, 1], [70, 1, 0, 18]], ids=case_name)
def test_triton_computes_the_gates_of_a_delta_rule(lengths: list[int]) -> None:
    triton_delta = pytest.importorskip("kvloom.kernels.state.triton_delta")
    torch.manual_seed(4)
    (rows, count), tokens, keys, each = rows_of(lengths), sum(lengths), 2, 3
    p = {k: move(v, torch.float32) for k, v in delta_arguments(tokens, keys, keys * each).items()}
    inputs = torch.randn(tokens, keys, 2 * each, device=DEVICE)  # of beta and of the decay, side by side
    p["beta"], p["g"] = inputs[..., :each], inputs[..., each:]
    gates = DeltaGates(*torch.randn(2, keys * each, device=DEVICE))
    states = move(pages(count, RULES["delta"].shape(p), torch.float32))
    after = states.double()
    g = -gates.a_log.exp() * functional.softplus(p["g"].flatten(1) + gates.dt_bias)
    plain = p | {"g": g, "beta": p["beta"].flatten(1).sigmoid()}
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in plain.items()}
    expected = RULES["delta"].reference(exact, after, rows)
    found, wanted = state_reference.delta_gates(p["g"], p["beta"], gates), (plain["g"], plain["beta"])
    torch.testing.assert_close(found, wanted)
    same(triton_delta.delta_rule(*p.values(), states, rows, gates), expected, 2e-4)
    same(states, after, 2e-4)
    with pytest.raises(ValueError, match="gates need their inputs g and beta"):
        state.delta_rule(p["q"], p["k"], p["v"], None, p["beta"], states, rows, gates=gates)


@pytest.mark.parametrize("dim", [32, 64, 128])
def test_triton_inverts_chunks_of_short_and_long_keys(dim: int) -> None:
    """Long keys in bf16 have their own kernel."""
    triton_delta = pytest.importorskip("kvloom.kernels.state.triton_delta")
    torch.manual_seed(6)
    rows, count = rows_of([70, 1, 64])
    p = {k: move(v, torch.bfloat16) for k, v in delta_arguments(135, 1, 2, dim, dim).items()}
    states = move(pages(count, RULES["delta"].shape(p), torch.float32))
    exact = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in p.items()}
    after = states.double()
    expected = RULES["delta"].reference(exact, after, rows)
    assert distance(triton_delta.delta_rule(*p.values(), states, rows), expected) < 0.01
    assert distance(states[1:], after[1:]) < 0.01


# What is refused, before anything runs.


def test_wrong_rows_raise_with_the_reason() -> None:
    one, two = torch.tensor([0]), torch.tensor([0, 4])
    with pytest.raises(ValueError, match="float32"):
        StateRows(two.float(), one, one, 4)
    with pytest.raises(ValueError, match="2 starts for 2 read and 1 write"):
        StateRows(two, two, one, 4)
    with pytest.raises(ValueError, match="at least one"):
        StateRows(one, one[:0], one[:0], 4)
    with pytest.raises(ValueError, match="fresh"):
        StateRows(two, one, one, 4, torch.tensor([True, False]))
    with pytest.raises(ValueError, match="longest is -1"):
        StateRows(two, one, one, -1)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("conv", {"x": torch.zeros(4, 6)}, r"states of pages \(3, 5, 4\)"),
        ("conv", {"weight": torch.zeros(5, 9)}, "4 columns for 9 taps"),
        ("conv", {"bias": torch.zeros(4)}, r"bias is \(4,\), but \(5,\)"),
        ("linear", {"log_decay": torch.zeros(4, 1)}, "log_decay"),
        ("mamba1", {"dt": torch.zeros(4, 1)}, "dt"),
        ("mamba1", {"b": torch.zeros(4, 4, 4)}, "6 channels do not fall into 4 groups"),
        ("mamba2", {"a": torch.zeros(4, 2)}, "a is"),
        ("mamba2", {"b": torch.zeros(4, 3, 5)}, "4 heads do not fall into 3 groups"),
        ("delta", {"q": torch.zeros(4, 3, 5)}, "4 value heads do not fall to 3 key heads"),
        ("delta", {"g": torch.zeros(4, 4, 4)}, r"g is \(4, 4, 4\), but \(4, 4, 5\)"),
        ("delta", {"beta": torch.zeros(4, 4, dtype=torch.int64)}, "beta is torch.int64"),
    ],
)
def test_arguments_that_do_not_fit(name: str, change: Arguments, message: str) -> None:
    rule = RULES[name]
    p = rule.arguments(4)
    states = torch.zeros(3, *rule.shape(p))
    slot = torch.tensor([1])
    with pytest.raises(ValueError, match=message):
        rule.public(p | change, states, StateRows(torch.tensor([0, 4]), slot, slot, 4))


def test_rows_that_do_not_fit_the_pages_or_tokens() -> None:
    p, states = linear_arguments(4), torch.zeros(3, 5, dtype=torch.float64)

    def run(starts: list[int], slot: int, longest: int = 4, pages: torch.Tensor = states) -> None:
        slots = torch.tensor([slot])
        state.linear_scan(**p, states=pages, rows=StateRows(torch.tensor(starts), slots, slots, longest))

    run([0, 4], 2)
    with pytest.raises(ValueError, match="at most 4 tokens"):
        run([0, 5], 2, 5)
    with pytest.raises(ValueError, match="must rise from 0"):
        run([-1, 4], 2)
    with pytest.raises(ValueError, match="`longest` is 3"):
        run([0, 4], 2, 3)
    with pytest.raises(ValueError, match="must lie in 0"):
        run([0, 4], 3)
    with pytest.raises(ValueError, match="contiguous inside"):
        run([0, 4], 2, pages=torch.zeros(5, 3, dtype=torch.float64).T)
    with pytest.raises(ValueError, match="keep them in one of"):
        run([0, 4], 2, pages=torch.zeros(3, 5, dtype=torch.int32))


def test_steps_are_short_rows() -> None:
    slots = torch.tensor([4, 0, 2])
    rows = StateRows.decode(slots, 3)
    assert rows.starts.tolist() == [0, 3, 6, 9]
    assert rows.steps
    assert rows.sequences == 3
    assert not StateRows.decode(slots, STEP_TOKENS + 1).steps
