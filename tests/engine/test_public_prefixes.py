"""Public prefixes under the engine: greedy tokens equal those of Hugging Face, tenants hit what they marked in the pool
and in tiers, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvloom.core import PUBLIC_TENANT, CacheControl, Tenant
from kvloom.engine import Engine, Request
from tests.engines import make_engine
from tests.models.lora_adapters import write_adapter
from tests.models.zoo import expected, tiny

from .test_offload import PATIENT, closed, drawn, greedy, offload_of, stored

POOL = 1 << 22
PUBLIC = 1 << 20
SYSTEM = drawn("system", 70)[0]
FAMILIES = ["llama", "gemma3_text", "qwen3_next", "deepseek_v3"]


def model_of(family: str) -> Any:
    return tiny(family, max_position_embeddings=512)


def ask(
    engine: Engine, tenant: str, prompt: list[int], public: int = 70, new: int = 6, **more: Any
) -> Request:
    request = engine.add(prompt, greedy(new), CacheControl(tenant=tenant, public_tokens=public, **more))
    engine.run()
    return request


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.few(2)
def test_tokens_are_exact_and_only_the_prefix_is_shared(family: str) -> None:
    prompts = [SYSTEM + tail for tail in drawn(family, 30, 20)]
    wanted = expected(model_of(family), prompts, 6)
    engine = make_engine(model_of(family), POOL, public_bytes=PUBLIC)
    found = [ask(engine, tenant, prompt) for tenant in ("red", "blue") for prompt in prompts]
    assert [one.tokens for one in found] == wanted * 2
    own = (
        64 if engine.layout.of("state") else 70
    )  # a tenant shares the six tokens after the last public block
    assert [one.cached_tokens for one in found] == [0, own, 64, own]
    assert ask(engine, "red", prompts[0]).cached_tokens == 99
    assert ask(engine, "red", prompts[0], public=0).cached_tokens == 0
    closed(engine)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("keys", [False, True])
def test_another_tenant_loads_the_public_prefix_from_a_tier(family: str, keys: bool, tmp_path: Path) -> None:
    """With `keys`, tiers store public pages under a key of their own, so that every tenant can read them."""
    prompt = SYSTEM + drawn(family, 40)[0]
    wanted = expected(model_of(family), [prompt], 6)[0]
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"red": "ab" * 32, "*": "cd" * 32}))
    file.chmod(0o600)
    tier = f"disk:{tmp_path / 'pages'}:64MiB" + (f"?keys={file}" if keys else "")
    hits = []
    for tenant in ("red", "blue", "red"):
        engine = make_engine(model_of(family), POOL, public_bytes=PUBLIC, tiers=[tier], offload=PATIENT)
        request = ask(engine, tenant, prompt)
        assert request.tokens == wanted
        hits.append(request.cached_tokens)
        assert offload_of(engine).stats.loaded_tokens == request.cached_tokens
        stored(engine)
        closed(engine)
    assert hits[0] == 0
    assert hits[1] == 64, "only the public prefix"
    assert hits[2] > 64, "its own blocks too"


def test_waiting_tenants_compute_a_public_prefix_once() -> None:
    prompts = [SYSTEM + tail for tail in drawn("once", 30, 30, 30)]
    engine = make_engine(model_of("llama"), POOL, public_bytes=PUBLIC, token_budget=32)
    control = [CacheControl(tenant=name, public_tokens=64) for name in ("red", "blue", "green")]
    requests = [engine.add(prompt, greedy(4), one) for prompt, one in zip(prompts, control, strict=True)]
    engine.run()
    assert [one.tokens for one in requests] == expected(model_of("llama"), prompts, 4)
    assert sorted(one.cached_tokens or 0 for one in requests) == [0, 64, 64]
    closed(engine)


@pytest.mark.slow
def test_a_tenant_at_its_quota_preempts_its_own_requests() -> None:
    """The public blocks of running requests count. A preempted request resumes at its own blocks."""
    model = tiny("llama")
    model.set_attn_implementation("eager")
    prompts = [SYSTEM[:48] + [3 + (i * 7 + own) % 50 for i in range(12)] for own in range(3)]
    wanted = expected(model, prompts, 60)
    slab = make_engine(model, POOL).layout.slab_bytes
    tenants = [Tenant("red", quota=12 * slab), Tenant("blue")]
    engine = make_engine(model, POOL, tenants=tenants, public_bytes=PUBLIC)
    red, blue = (CacheControl(tenant=name, public_tokens=48) for name in ("red", "blue"))
    mine = [engine.add(prompt, greedy(60), red, priority=1) for prompt in prompts[:2]]
    other = engine.add(prompts[2], greedy(60), blue)
    engine.run()
    assert [one.tokens for one in (*mine, other)] == wanted
    assert sum(one.preemptions for one in mine) > 0
    assert other.preemptions == 0
    closed(engine)


def test_cached_public_blocks_are_not_charged_to_a_tenant() -> None:
    layout = make_engine(model_of("llama"), POOL).layout
    quota = layout.slab_bytes_for(16) * 12
    engine = make_engine(
        model_of("llama"), POOL, public_bytes=PUBLIC, tenants=(Tenant("red", quota=quota), Tenant("blue"))
    )
    with pytest.raises(ValueError, match="the tenant's quota is"):
        engine.add(drawn("big", 300)[0], greedy(4), CacheControl(tenant="red", public_tokens=300))
    request = ask(engine, "red", SYSTEM + drawn("n", 20)[0])
    assert request.finish_reason == "length"
    account = engine.cache.account("red")
    assert 0 < account.used < engine.cache.account(PUBLIC_TENANT).used
    closed(engine)


def test_adapters_have_their_own_public_prefixes(tmp_path: Path) -> None:
    base = model_of("llama")
    targets = ("q_proj", "v_proj")
    path = str(write_adapter(tmp_path / "a", base, targets))
    engine = make_engine(model_of("llama"), POOL, public_bytes=PUBLIC, lora={"a": path})
    prompt = SYSTEM + drawn("lora", 20)[0]

    def hit(tenant: str, lora: str | None) -> int | None:
        request = engine.add(prompt, greedy(2), CacheControl(tenant=tenant, public_tokens=64), lora=lora)
        engine.run()
        return request.cached_tokens

    assert [hit("red", None), hit("blue", "a"), hit("green", "a"), hit("green", None)] == [0, 0, 64, 64]
    closed(engine)


def test_a_mark_is_refused_where_public_prefixes_are_off() -> None:
    engine = make_engine(model_of("llama"), POOL)
    with pytest.raises(ValueError, match="--public-prefixes SIZE"):
        ask(engine, "red", SYSTEM)
    closed(engine)
