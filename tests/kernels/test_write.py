"""The write kernel against the reference, and both against plain arithmetic: what lies in the pages afterwards."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from kvloom.core import LayerSpec, PoolLayout, attention_fields
from kvloom.kernels.attention import attend
from kvloom.kernels.dtypes import quantised_max
from kvloom.kernels.fused import RMSNorm, operations as fused
from kvloom.kernels.memory import allocate, layer_views
from kvloom.kernels.write import Rotary, apply_rotary, reference, write

try:
    from kvloom.kernels.write import triton_write
except ImportError:  # pragma: no cover - a machine without Triton
    triton_write = None

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FP8 = torch.float8_e4m3fn
BLOCK = 16
FORMS = ["halves", "pairs", "unpaired"]

needs_triton = pytest.mark.skipif(triton_write is None, reason="Triton is not installed")


def angles(tokens: int, pairs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.rand(tokens, pairs, device=DEVICE, dtype=torch.float64) * 6.0
    return turns.cos().to(dtype), turns.sin().to(dtype)


def turned(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Every pair as a complex number times e^(i angle), in float64."""
    x, n = x.double().clone(), rotary.cos.shape[1]
    at = x.shape[-1] - 2 * n if rotary.tail else 0
    part = x[..., at : at + 2 * n].clone()
    for i in range(n):
        reads = (i, i + n) if rotary.form == "halves" else (2 * i, 2 * i + 1)
        writes = (2 * i, 2 * i + 1) if rotary.form == "pairs" else (i, i + n)
        number = torch.complex(part[..., reads[0]], part[..., reads[1]])
        number = number * torch.complex(rotary.cos[:, i].double(), rotary.sin[:, i].double())[:, None]
        x[..., at + writes[0]], x[..., at + writes[1]] = number.real, number.imag
    return x


def some_slots(tokens: int, pages: int, rng: random.Random) -> torch.Tensor:
    """Distinct slots outside page 0, some of them to be skipped."""
    slots = rng.sample(range(BLOCK, pages * BLOCK), tokens)
    dtype = rng.choice([torch.int32, torch.int64])
    return torch.tensor([-1 if rng.random() < 0.15 else s for s in slots], dtype=dtype, device=DEVICE)


def blank(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Pages inside a larger buffer (odd strides), every byte 0x7f: NaN in fp8, 127 in int8, large elsewhere."""
    pages, block, *rest = shape
    wide = torch.empty(pages, 2, block, *rest, dtype=dtype, device=DEVICE)
    wide.view(torch.uint8).fill_(0x7F)
    return wide[:, 1]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize(("dim", "pairs"), [(32, 16), (40, 10), (24, 4)])
def test_rotary_rotates_pairs_as_complex_numbers(form: str, tail: bool, dim: int, pairs: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, dim, device=DEVICE)
    rotary = Rotary(*angles(5, pairs), form, tail)
    torch.testing.assert_close(apply_rotary(x, rotary).double(), turned(x, rotary), atol=1e-6, rtol=1e-6)


def test_tables_of_angles_are_read_as_models_give_them() -> None:
    """Halves repeated (cat), pairs repeated (repeat_interleave) and complex tables give the same rotation."""
    torch.manual_seed(0)
    x = torch.randn(6, 2, 16, device=DEVICE)
    cos, sin = angles(6, 8)
    plain = apply_rotary(x, Rotary(cos, sin, "pairs"))
    twice = [torch.cat((t, t), -1)[None] for t in (cos, sin)]
    assert torch.equal(apply_rotary(x, Rotary.from_tables(*twice, "pairs")), plain)
    each = [t.repeat_interleave(2, -1) for t in (cos, sin)]
    assert torch.equal(apply_rotary(x, Rotary.from_tables(*each, "pairs", repeated="pairs")), plain)
    table = torch.complex(cos, sin)
    assert torch.equal(apply_rotary(x, Rotary(table.real, table.imag, "pairs")), plain)


@pytest.mark.parametrize(
    ("model", "form", "repeated"),
    [
        ("llama.modeling_llama.apply_rotary_pos_emb", "halves", "halves"),
        ("cohere.modeling_cohere.apply_rotary_pos_emb", "pairs", "pairs"),
        ("glm.modeling_glm.apply_rotary_pos_emb", "pairs", "halves"),
        ("deepseek_v3.modeling_deepseek_v3.apply_rotary_pos_emb_interleave", "unpaired", "halves"),
    ],
)
def test_forms_are_those_of_the_modeling_code(model: str, form: str, repeated: str) -> None:
    pytest.importorskip("transformers")
    module, _, name = model.rpartition(".")
    theirs = getattr(pytest.importorskip(f"transformers.models.{module}"), name)
    torch.manual_seed(0)
    q, k = torch.randn(1, 4, 6, 16), torch.randn(1, 2, 6, 16)
    cos, sin = (t.cpu() for t in angles(6, 8))
    cos, sin = (
        torch.cat((t, t), -1)[None] if repeated == "halves" else t.repeat_interleave(2, -1)[None]
        for t in (cos, sin)
    )
    expected = theirs(q, k, cos, sin)
    rotary = Rotary.from_tables(cos, sin, form, repeated=repeated)
    for x, y in zip((q, k), expected, strict=True):
        assert torch.equal(apply_rotary(x[0].transpose(0, 1), rotary), y[0].transpose(0, 1))


def test_llama_4_rotates_pairs_by_complex_numbers() -> None:
    pytest.importorskip("transformers")
    theirs = pytest.importorskip("transformers.models.llama4.modeling_llama4").apply_rotary_emb
    q, k = torch.randn(1, 6, 4, 16), torch.randn(1, 6, 2, 16)
    table = torch.complex(*(t.cpu() for t in angles(6, 8)))
    ours = apply_rotary(k[0], Rotary(table.real, table.imag, "pairs"))
    torch.testing.assert_close(ours, theirs(q, k, table[None])[1][0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.int8, FP8])
@pytest.mark.parametrize("kind", ["dynamic", "heads", "one"])
def test_what_is_read_back_is_within_half_a_step(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    tokens, heads, dim = 40, 3, 16
    new = torch.randn(tokens, heads, dim, device=DEVICE) * torch.rand(tokens, heads, 1, device=DEVICE) * 50
    new[3] = 0.0
    new[4, 0, 5] = 1e4
    most = quantised_max(dtype) or 0.0
    scales = {
        "dynamic": torch.full((4, BLOCK, heads), math.nan, device=DEVICE),
        "heads": torch.rand(heads, device=DEVICE) + 0.5,
        "one": torch.tensor(0.7, device=DEVICE),
    }[kind]
    pages = blank((4, BLOCK, heads, dim), dtype)
    write(pages, None, torch.arange(BLOCK, BLOCK + tokens, device=DEVICE), new, None, k_scale=scales)
    stored = pages[1:].flatten(0, 1)[:tokens].double()
    step = scales[1:].flatten(0, 1)[:tokens, :, None] if kind == "dynamic" else scales.view(1, -1, 1)
    held = new.double().clamp(-most * step.double(), most * step.double())
    # A step of int8 is one scale; one of fp8 is an eighth of the value's power of two, at least 2**-9 scales.
    size = torch.ones_like(held) if dtype == torch.int8 else held.div(step).abs().clamp_min(2.0**-6)
    step = step.double() * (size if dtype == torch.int8 else 2.0 ** (size.log2().floor() - 3))
    back = stored * (
        scales[1:].flatten(0, 1)[:tokens, :, None] if kind == "dynamic" else scales.view(1, -1, 1)
    )
    assert torch.isfinite(back).all()
    assert ((back - held).abs() <= step * 0.5 * (1 + 1e-5)).all()
    if kind == "dynamic":
        assert (stored[5:].abs().amax(-1) == most).all()


def test_too_large_is_clamped_and_ties_go_to_even() -> None:
    new = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 1e9, -1e9], device=DEVICE).view(1, 1, 8)
    slot, one = torch.tensor([BLOCK], device=DEVICE), torch.ones(1, device=DEVICE)
    for dtype, expected in [
        (torch.int8, [0, 2, 2, 0, -2, 126, 127, -127]),
        (FP8, [0.5, 1.5, 2.5, -0.5, -1.5, 128, 448, -448]),
    ]:
        pages = blank((2, BLOCK, 1, 8), dtype)
        write(pages, None, slot, new, None, k_scale=one)
        assert pages[1, 0, 0].float().tolist() == expected


SHAPES = [(64, 64, 32), (80, 80, 10), (96, 96, 48), (24, 16, 4), (128, 128, 0), (576, None, 32)]
STORED = [None, torch.int8, FP8]


@needs_triton
@pytest.mark.parametrize(
    ("shape", "stored", "seed"), [(*c, i) for i, c in enumerate(itertools.product(SHAPES, STORED))]
)
@pytest.mark.few(1)
def test_kernel_stores_what_the_reference_stores(
    shape: tuple[int, int | None, int], stored: torch.dtype | None, seed: int
) -> None:
    """K, V and q of random batches, every form, scales of both kinds; the same bytes in every slot and around."""
    if stored == FP8 and not CUDA:
        pytest.skip("Triton's interpreter does not round to fp8 as devices do")
    for trial in range(4):
        check_kernel(shape, stored, random.Random(seed * 100 + trial))


def check_kernel(shape: tuple[int, int | None, int], stored: torch.dtype | None, rng: random.Random) -> None:
    torch.manual_seed(rng.randrange(1 << 30))
    k_dim, v_dim, pairs = shape
    heads = 1 if v_dim is None else rng.choice([1, 2, 3])
    # Triton's interpreter cuts bf16 instead of rounding it; where nothing is rounded, it is used here too.
    dtypes = [torch.float32, torch.float16] + ([torch.bfloat16] if CUDA or not pairs else [])
    dtype = rng.choice(dtypes)
    kept = stored or (dtype if dtype == torch.bfloat16 else rng.choice([dtype, torch.float32]))
    tokens, pages = rng.choice([1, 7, 33]), 5
    slots = some_slots(tokens, pages, rng)
    fused = torch.randn(tokens, 6, heads, k_dim, device=DEVICE).to(dtype)  # views with strides of their own
    k, v, q = fused[:, 0], None, None
    if v_dim is not None:
        v = fused[:, 1, :, :v_dim]
    rotary = None
    if pairs:
        form, tail = rng.choice(FORMS), v_dim is None or rng.random() < 0.3
        rounded = rng.random() < 0.5
        rotary = Rotary(*angles(tokens, pairs, rng.choice([torch.float32, dtype])), form, tail, rounded)
        q = (
            fused[:, 2:5].flatten(1, 2)
            if rng.random() < 0.5
            else fused[:, 2, :, : max(2 * pairs, k_dim // 2)]
        )
    kind = rng.choice(["dynamic", "heads", "one"]) if stored else None
    apart = rng.random() < 0.5  # q turned into another tensor, or in place
    results = []
    for call in (triton_write.write, reference_write):
        fields, scales = [], []
        for dim in (k_dim, v_dim):
            fields.append(None if dim is None else blank((pages, BLOCK, heads, dim), kept))
            scales.append(None if dim is None or kind is None else some_scales(kind, pages, heads))
        out = torch.full_like(q, math.nan) if q is not None and apart else None
        target = None if q is None else q.clone() if out is None else q
        call(fields[0], fields[1], slots, k, v, *scales, rotary, target, out)
        results.append([*fields, *scales, target if out is None else out])
    for ours, theirs in zip(*results, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert same_bytes(ours, theirs), (shape, stored, dtype, kept, kind, rotary and rotary.form)


def some_scales(kind: str, pages: int, heads: int) -> torch.Tensor:
    if kind == "dynamic":
        return blank((pages, BLOCK, heads), torch.float32)
    return (
        torch.linspace(0.01, 0.03, heads, device=DEVICE)
        if kind == "heads"
        else torch.tensor(0.02, device=DEVICE)
    )


def reference_write(k_pages, v_pages, slots, k, v, k_scale, v_scale, rotary, q, q_out) -> None:
    reference.write(k_pages, slots, k, k_scale, rotary)
    if v is not None:
        reference.write(v_pages, slots, v, v_scale)
    if q is not None:
        (q if q_out is None else q_out).copy_(apply_rotary(q, rotary))


@needs_triton
@pytest.mark.parametrize("form", FORMS)
def test_kernel_stores_fp8_that_needs_no_rounding(form: str) -> None:
    """What fp8 holds exactly, turned by quarter turns: exact in the interpreter, too."""
    torch.manual_seed(0)
    most = torch.randint(-7, 8, (2, 11, 2, 32), device=DEVICE) * 2.0 ** torch.randint(
        0, 6, (2, 11, 2, 32), device=DEVICE
    )
    most[..., 5] = 448.0  # so that the dynamic scale is a power of two
    k, v = (most * 0.25).unbind()
    quarters = torch.randint(0, 4, (11, 16), device=DEVICE)
    cos, sin = (
        torch.tensor(t, device=DEVICE)[quarters] for t in ([1.0, 0.0, -1.0, 0.0], [0.0, 1.0, 0.0, -1.0])
    )
    slots = torch.arange(BLOCK, BLOCK + 11, device=DEVICE)
    found = []
    for call in (triton_write.write, reference_write):
        fields = [blank((2, BLOCK, 2, 32), FP8) for _ in range(2)]
        scales = [some_scales("dynamic", 2, 2), torch.tensor(0.25, device=DEVICE)]
        call(*fields, slots, k, v, *scales, Rotary(cos, sin, form), None, None)
        found.append((*fields, *scales))
    for ours, theirs in zip(*found, strict=True):
        assert same_bytes(ours, theirs)
    assert torch.equal(found[0][1][1, :11].float() * 0.25, v)


@needs_triton
@pytest.mark.parametrize("stored", [torch.float32, torch.int8])
@pytest.mark.parametrize("form", FORMS)
def test_fusing_the_rotation_changes_nothing(stored: torch.dtype, form: str) -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 9, 2, 32, device=DEVICE).half().unbind()
    rotary = Rotary(*angles(9, 16), form)
    slots = torch.arange(BLOCK, BLOCK + 9, device=DEVICE)
    found = []
    for new, angle in [(k, rotary), (apply_rotary(k, rotary), None)]:
        pages = blank((2, BLOCK, 2, 32), stored)
        scale = None if stored == torch.float32 else torch.zeros(2, BLOCK, 2, device=DEVICE)
        triton_write.write(pages, pages.clone(), slots, new, v, scale, scale, angle)
        found.append(pages)
    assert same_bytes(*found)


@needs_triton
def test_large_batches_take_large_tiles_and_store_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_write, "PROGRAMS", 0)
    check_kernel((64, 64, 32), torch.int8, random.Random(1))
    check_kernel((80, 80, 10), None, random.Random(2))


@pytest.mark.parametrize("dtype", ["fp32", "int8", "fp8"])
def test_written_pages_of_a_pool_are_attended_to(dtype: str) -> None:
    """write, views and attend together: the last token reads what was written, within the page's precision."""
    torch.manual_seed(0)
    layers = {str(i): LayerSpec("token", attention_fields(2, 32, dtype)) for i in range(3)}
    layout = PoolLayout.build(layers)
    buffer = allocate(layout, 8, DEVICE)
    buffer.fill_(0xFF)  # NaN in fp8 and in the scales
    view = layer_views(buffer, layout)["1"].fields
    tokens = 37
    k, v, q = torch.randn(3, tokens, 2, 32, device=DEVICE).unbind()
    rotary = Rotary(*angles(tokens, 16))
    slots = torch.arange(BLOCK, BLOCK + tokens, device=DEVICE)
    scales = {"k_scale": view.get("k_scale"), "v_scale": view.get("v_scale")}
    out = torch.full_like(q, math.nan)
    write(view["k"], view["v"], slots, k, v, rotary=rotary, q=q, q_out=out, **scales)
    got, _ = attend(
        out[-1:],
        view["k"],
        view["v"],
        torch.tensor([[1, 2, 3]], device=DEVICE),
        torch.tensor([0, 1]),
        torch.tensor([tokens]),
        **scales,
    )
    weights = torch.einsum("hd,thd->ht", turned(q, rotary)[-1], turned(k, rotary)) * 32**-0.5
    exact = torch.einsum("ht,thd->hd", weights.softmax(-1), v.double())
    bound = {"fp32": 1e-5, "int8": 0.015, "fp8": 0.06}[dtype]
    assert (got[0].double() - exact).norm() / exact.norm() < bound


def test_mistakes_are_refused_before_anything_is_written() -> None:
    pages, new = torch.zeros(2, BLOCK, 2, 8, device=DEVICE), torch.ones(3, 2, 8, device=DEVICE)
    slots = torch.arange(BLOCK, BLOCK + 3, device=DEVICE)
    small = pages.to(torch.int8)
    cos = torch.ones(3, 4, device=DEVICE)
    with pytest.raises(ValueError, match="does not fit pages"):
        write(pages, pages, slots, new[:, :1], new)
    with pytest.raises(ValueError, match="for 3 tokens of k"):
        write(pages, pages, slots[:2], new, new)
    with pytest.raises(ValueError, match="side by side"):
        write(pages, pages, slots, new.repeat(1, 1, 2)[..., ::2], new)
    with pytest.raises(ValueError, match="give both v and v_pages, or neither"):
        write(pages, None, slots, new, new)
    with pytest.raises(ValueError, match="int8 pages need v_scale"):
        write(pages, small, slots, new, new)
    with pytest.raises(ValueError, match="neither one value nor 2 heads'"):
        write(small, None, slots, new, None, k_scale=torch.ones(3, device=DEVICE))
    with pytest.raises(ValueError, match="needs to be float32"):
        write(small, None, slots, new, None, k_scale=torch.ones(2, 4, 2, device=DEVICE))
    with pytest.raises(ValueError, match="leave it out"):
        write(pages, None, slots, new, None, k_scale=torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match="turn 10 dims"):
        write(pages, None, slots, new, None, rotary=Rotary(torch.ones(3, 5), torch.ones(3, 5)))
    with pytest.raises(ValueError, match="unknown rotary form 'neox'"):
        write(pages, None, slots, new, None, rotary=Rotary(cos, cos, "neox"))
    with pytest.raises(ValueError, match="give rotary"):
        write(pages, pages, slots, new, new, q=new)
    with pytest.raises(ValueError, match="needs a q of its shape"):
        write(pages, pages, slots, new, new, rotary=Rotary(cos, cos), q=new, q_out=new[:2])
    assert not pages.any()
    assert not small.any()


def test_nothing_to_write_is_no_mistake() -> None:
    pages = torch.zeros(2, BLOCK, 2, 8, device=DEVICE)
    none = torch.zeros(0, 2, 8, device=DEVICE)
    write(pages, pages, torch.zeros(0, dtype=torch.long, device=DEVICE), none, none)
    slots = torch.full((3,), -1, device=DEVICE)
    write(pages, pages, slots, torch.ones(3, 2, 8, device=DEVICE), torch.ones(3, 2, 8, device=DEVICE))
    assert not pages.any()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="a captured graph needs a GPU")
def test_a_captured_graph_fits_other_slots() -> None:
    torch.manual_seed(0)
    k, v, q = torch.randn(3, 8, 2, 64, device=DEVICE, dtype=torch.bfloat16).unbind()
    slots = torch.arange(BLOCK, BLOCK + 8, device=DEVICE)
    pages = torch.zeros(2, 4, BLOCK, 2, 64, device=DEVICE, dtype=torch.int8)
    scales = torch.zeros(2, 4, BLOCK, 2, device=DEVICE)
    rotary, out = Rotary(*angles(8, 32, torch.bfloat16)), torch.zeros_like(q)

    def call() -> None:
        write(*pages, slots, k, v, k_scale=scales[0], v_scale=scales[1], rotary=rotary, q=q, q_out=out)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    pages.zero_()
    slots += 2 * BLOCK
    graph.replay()
    expected, size = torch.zeros_like(pages), torch.zeros_like(scales)
    reference.write(expected[0], slots, k, size[0], rotary)
    reference.write(expected[1], slots, v, size[1])
    assert torch.equal(pages, expected)
    assert torch.equal(scales[:, 3], size[:, 3])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32], ids=str)
def test_values_may_lie_with_their_tokens_dense(dtype: torch.dtype) -> None:
    """Values by dimension: what quantised pages keep, so that tensor cores find runs of tokens."""
    gen = torch.Generator().manual_seed(3)
    k_pages = torch.zeros(6, 16, 2, 80, dtype=dtype, device=DEVICE)
    turned = torch.zeros(6, 2, 80, 16, dtype=dtype, device=DEVICE).permute(0, 3, 1, 2)
    plain = torch.zeros(6, 16, 2, 80, dtype=dtype, device=DEVICE)
    scales = [torch.zeros(6, 16, 2, device=DEVICE) if dtype == torch.int8 else None for _ in range(4)]
    slots = torch.tensor([17, 18, 40, -1, 95], device=DEVICE)
    k, v = torch.randn(2, 5, 2, 80, generator=gen).to(DEVICE).unbind()
    triton_write.write(k_pages, turned, slots, k, v, scales[0], scales[1])
    triton_write.write(k_pages, plain, slots, k, v, scales[2], scales[3])
    assert plain.any()
    assert torch.equal(turned, plain)


def test_a_rounded_rotation_has_the_bits_of_modeling_code() -> None:
    q = torch.randn(7, 4, 32, generator=torch.Generator().manual_seed(1)).bfloat16().to(DEVICE)
    cos, sin = (x.bfloat16().to(DEVICE) for x in angles(7, 16))
    theirs = fused.apply_rotary(
        q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos.repeat(1, 2)[None], sin.repeat(1, 2)[None]
    )[0][0].transpose(0, 1)
    assert torch.equal(apply_rotary(q, Rotary(cos, sin, rounded=True)), theirs)
    assert not torch.equal(apply_rotary(q, Rotary(cos, sin)), theirs)


@needs_triton
@pytest.mark.parametrize("form", ["llama", "gemma"])
@pytest.mark.parametrize("stored", [None, torch.int8])
def test_latents_are_normalised_before_they_are_written(form: str, stored: torch.dtype | None) -> None:
    torch.manual_seed(0)
    joined = torch.randn(9, 1, 96, device=DEVICE)
    latents, q = joined[..., 16:], torch.randn(9, 3, 24, device=DEVICE)  # 64 dims to normalise, 16 to rotate
    norm = RMSNorm(torch.randn(64, device=DEVICE), 1e-6, form)
    rotary = Rotary(*angles(9, 8), "pairs", tail=True)
    slots = torch.arange(BLOCK, BLOCK + 9, device=DEVICE)
    found = []
    normed = torch.cat((norm(latents[..., :64]), latents[..., 64:]), -1)
    for new, given in ((latents, norm), (normed, None)):
        pages = blank((2, BLOCK, 1, 80), stored or torch.float32)
        scale = None if stored is None else torch.zeros(2, BLOCK, 1, device=DEVICE)
        out = torch.empty(9, 3, 24, device=DEVICE)
        triton_write.write(pages, None, slots, new, None, scale, None, rotary, q, out, given)
        found.append((pages[1, :9].float() * (1 if scale is None else scale[1, :9, :, None]), out))
    torch.testing.assert_close(found[0], found[1], atol=1e-5 if stored is None else 0.05, rtol=1e-5)
    with pytest.raises(ValueError, match="does not fit"):
        write(
            blank((2, BLOCK, 1, 80), torch.float32),
            None,
            slots,
            latents,
            None,
            rotary=rotary,
            norm=RMSNorm(norm.weight[1:], 1e-6),
        )
    with pytest.raises(ValueError, match="at the end"):
        write(
            blank((2, BLOCK, 1, 80), torch.float32),
            None,
            slots,
            latents,
            None,
            rotary=Rotary(rotary.cos, rotary.sin),
            norm=norm,
        )
