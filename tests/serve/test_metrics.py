"""/metrics: vLLM's names beside ours, and values that match the requests."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvloom.core import MISS_REASONS
from kvloom.engine import SamplingParams
from kvloom.serve.metrics.saved_time import SavedTime
from kvloom.serve.metrics.series import PoolInfo, Series, engine_series, exposition, tenant_series
from kvloom.serve.worker.messages import Add, EngineStats, RequestProgress, TenantUsage
from kvloom.serve.worker.stats import tier_usage
from kvloom.serve.worker.worker import Worker
from kvloom.tiers import Form, HostConfig, HostTier, Objects, Ranges
from tests.engine.test_offload import PATIENT
from tests.engines import make_engine
from tests.models.zoo import tiny
from tests.serve.running import MODEL, Running

ASKED_FOR = [
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:request_prompt_tokens_bucket",
    "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_bucket",
    "vllm:request_params_max_tokens_bucket",
    "vllm:time_to_first_token_seconds_bucket",
    "vllm:inter_token_latency_seconds_bucket",
    "vllm:time_per_output_token_seconds_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
    "vllm:e2e_request_latency_seconds_bucket",
    "vllm:request_queue_time_seconds_bucket",
    "vllm:request_inference_time_seconds_bucket",
    "vllm:request_prefill_time_seconds_bucket",
    "vllm:request_decode_time_seconds_bucket",
    "vllm:cache_config_info",
    "vllm:kv_block_idle_before_evict_seconds_bucket",
    "vllm:kv_block_reuse_gap_seconds_bucket",
]
"""Series that dashboards of the field ask for."""


def samples(server: Running) -> dict[str, float]:
    return server.metrics()


def test_vllms_names_and_labels_are_served(server: Running) -> None:
    text = server.send("GET", "/metrics")[2]
    found = {
        sample.name: sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert not [name for name in ASKED_FOR if name not in found]
    for name in ASKED_FOR:
        assert found[name]["model_name"] == MODEL
        assert found[name]["engine"] == "0"


def test_the_documented_tables_match_the_served_metrics(server: Running) -> None:
    """Names and labels, against a real server; if the change is meant: `python tools/metrics_table.py`."""
    text = (Path(__file__).parent.parent.parent / "docs" / "observability.md").read_text(encoding="utf-8")
    table = text.partition("<!-- metrics -->\n")[2].partition("<!-- /metrics -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    said = {name: cells[1] for cells in rows for name in re.findall(r"`([^`]+)`", cells[0] + cells[2])}
    aliases = documented_aliases(text)
    said |= {old: said[new] for old, new in aliases.items()}
    told: dict[str, str] = {}
    for family in text_string_to_metric_families(server.send("GET", "/metrics")[2]):
        told[family.name + ("_total" if family.type == "counter" else "")] = family.documentation
        for sample in family.samples:
            labels = set(sample.labels) - {"le", "model_name", "engine"}
            name = (
                re.sub("_(bucket|sum|count)$", "", sample.name) if family.type == "histogram" else sample.name
            )
            assert labels == set(re.findall(r"`([^`]+)`", said[name])), name
    assert set(said) == set(told)
    assert [
        name for cells in rows for name in re.findall(r"`([^`]+)`", cells[0]) if told[name] not in cells[3]
    ] == []


def documented_aliases(text: str) -> dict[str, str]:
    table = text.partition("<!-- aliases -->\n")[2].partition("<!-- /aliases -->")[0]
    pairs = re.findall(r"^\| `([^`{]+)` \| `([^`{]+)` \|$", table, re.MULTILINE)
    assert pairs
    return dict(pairs)


def test_every_deprecated_name_has_the_value_of_its_new_name(server: Running) -> None:
    server.complete(prompt="an alias has the same value", max_tokens=4, ignore_eos=True)
    server.wait_for(server.idle)
    text = server.send("GET", "/metrics")[2]
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
    }
    documents = (Path(__file__).parent.parent.parent / "docs" / "observability.md").read_text(
        encoding="utf-8"
    )
    for old, new in documented_aliases(documents).items():
        assert families[old].documentation == f"Deprecated alias of {new}"
        assert families[old].type == families[new].type
        values = [
            {
                (
                    sample.name.removeprefix(name.removesuffix("_total")),
                    *sorted(sample.labels.items()),
                ): sample.value
                for sample in families[name].samples
            }
            for name in (old, new)
        ]
        assert values[0] == values[1], old
    usage = tenant_series({"red": TenantUsage(used=7, in_use=5)})[0].value
    assert usage == {("red", "used"): 7, ("red", "in_use"): 5, ("red", "held"): 5}


def test_latencies_are_histograms_with_dense_bounds(server: Running) -> None:
    server.complete(prompt="for the histograms", max_tokens=4, ignore_eos=True)
    found = server.metrics()
    for name, least, most in (
        ("time_to_first_token", 0.001, 640),
        ("inter_token", 0.001, 5),
        ("request", 0.01, 960),
    ):
        bounds = [
            float(key.split('"')[1]) for key in found if key.startswith(f"kvloom_{name}_seconds_bucket{{")
        ]
        assert (bounds[0], bounds[-2], bounds[-1]) == (least, most, float("inf"))
        # A quantile is known to within its bounds.
        assert max(high / low for low, high in pairwise(bounds[:-1])) <= 2.5
        assert (
            found[f'kvloom_{name}_seconds_bucket{{le="+Inf"}}'] == found[f"kvloom_{name}_seconds_count"] > 0
        )


def test_no_series_is_served_twice(server: Running) -> None:
    lines = [
        line.rsplit(" ", 1)[0]
        for line in server.send("GET", "/metrics")[2].splitlines()
        if not line.startswith("#")
    ]
    assert len(lines) == len(set(lines)) > 300
    families_ = [line for line in server.send("GET", "/metrics")[2].splitlines() if line.startswith("# TYPE")]
    assert len(families_) == len(set(families_))


def test_metrics_count_what_requests_did(small: Running) -> None:
    prompts = [[5 + (seed + i * (1 + seed)) % 300 for i in range(100)] for seed in range(3)]
    before = samples(small)
    usage = [
        small.complete(prompt=prompt, max_tokens=9, ignore_eos=True)["usage"]
        for prompt in (*prompts, prompts[0])
    ]
    small.wait_for(small.idle)
    after = samples(small)

    def rise(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
    assert cached == 99
    for name in ("kvloom_cached_prompt_tokens_total", "kvloom_hit_tokens_total", 'kvloom_tier_hit_tokens_total{tier="device"}'):  # fmt: skip
        assert rise(name) == cached
    assert rise("kvloom_prompt_tokens_total") == rise("kvloom_looked_up_tokens_total") == 400
    assert rise('vllm:prompt_tokens_total{engine="0",model_name="tiny"}') == 400
    assert rise("kvloom_output_tokens_total") == 36
    assert rise('kvloom_finished_answers_total{reason="length"}') == 4
    assert rise('kvloom_lookups_total{reason="never_seen"}') == 3
    assert rise('kvloom_lookups_total{reason="complete"}') == 1
    assert rise('kvloom_hit_pages_total{kind="full"}') == 7
    assert rise("kvloom_reuse_seconds_count") == 1
    for name in ("time_to_first_token_seconds", "queue_seconds", "prefill_seconds", "decode_seconds", "request_seconds", "time_per_output_token_seconds"):  # fmt: skip
        assert rise(f"kvloom_{name}_count") == 4
        assert rise(f"kvloom_{name}_sum") > 0
    assert rise("kvloom_inter_token_seconds_count") == 4 * 8
    parts = sum(rise(f"kvloom_{part}_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert parts == pytest.approx(rise("kvloom_request_seconds_sum"))


def test_evictions_are_counted_with_their_age(small: Running) -> None:
    before = samples(small)
    for seed in range(12):
        small.complete(
            prompt=[3 + (seed * 31 + i * 7) % 300 for i in range(150)], max_tokens=4, ignore_eos=True
        )
    small.wait_for(lambda: samples(small)["kvloom_evictions_total"] > before["kvloom_evictions_total"])
    small.wait_for(small.idle)
    found = samples(small)
    assert found["kvloom_eviction_age_seconds_count"] == found["kvloom_evictions_total"]
    assert found['kvloom_evicted_entries_total{kind="blocks"}'] == found["kvloom_evictions_total"]
    assert found["kvloom_evicted_bytes_total"] > 0
    assert found["kvloom_cached_bytes"] + found["kvloom_pool_free_bytes"] == found["kvloom_pool_bytes"]


def test_a_running_stream_shows_in_the_gauges(small: Running) -> None:
    before = samples(small)
    stream = small.client().completions.create(
        model=MODEL, prompt="abc", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    small.wait_for(lambda: samples(small)["kvloom_running"] == 1)
    found = samples(small)
    assert found["kvloom_pool_usage_ratio"] > 0
    assert found["kvloom_unused_tokens"] < 16
    assert found['kvloom_tenant_requests{tenant="",state="running"}'] == 1
    stream.close()
    small.wait_for(small.idle)
    after = samples(small)
    for name in ("kvloom_disconnected_requests_total", 'kvloom_finished_answers_total{reason="cancelled"}'):
        assert after[name] == before.get(name, 0) + 1


def test_every_miss_reason_is_served_from_the_start() -> None:
    rows = {row.name: row for row in engine_series(EngineStats(), PoolInfo())}
    reasons = rows["kvloom_lookups"].value
    assert reasons == {reason.replace(" ", "_"): 0 for reason in MISS_REASONS}


def test_a_tiers_usage_and_outcomes_are_served() -> None:
    form = Form("fp32", "token", 64, 64)
    tier = HostTier(HostConfig(capacity=8 << 20))
    try:
        objects = Objects([bytes([i]) * 16 for i in range(4)], group=0, form=form)
        buffer = np.arange(512, dtype=np.uint16).view(np.uint8)[:512].copy()
        assert tier.write(objects, Ranges(buffer, np.arange(4) * 64)).wait(5)
        assert tier.read(objects, Ranges(buffer, np.arange(4) * 64)).wait(5)
        missing = Objects([b"x" * 16], group=0, form=form)
        tier.read(missing, Ranges(buffer, [0])).wait(5)
        use = tier_usage("host", tier.stats(), "open")
    finally:
        tier.close()
    found = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(
            exposition(engine_series(EngineStats(tiers=[use]), PoolInfo()), MODEL)
        )
        for sample in family.samples
    }
    assert found["kvloom_tier_objects", "host"] == 4
    assert found["kvloom_tier_writes_total", "host", "ok"] == 4
    assert found["kvloom_tier_reads_total", "host", "ok"] == 4
    assert found["kvloom_tier_reads_total", "host", "missing"] == 1
    assert found["kvloom_tier_read_bytes_total", "host"] == 4 * 64
    assert found["kvloom_tier_breaker", "closed", "host"] == 0
    assert found["kvloom_tier_breaker", "host", "open"] == 1


def test_loads_from_tiers_are_reported_with_tier_and_times(tmp_path: Path) -> None:
    """A prompt that left the pool comes back from host memory, and after a restart from disk."""
    prompt = [3 + (i * 7) % 60 for i in range(90)]
    told: list[RequestProgress] = []
    for _ in range(2):
        tiers = ["host:8MiB", f"disk:{tmp_path}:64MiB"]
        engine = make_engine(tiny("llama"), 1 << 20, tiers=tiers, offload=PATIENT)
        worker = Worker(engine)
        stats = EngineStats()
        worker.handle(Add(1, prompt, SamplingParams(max_tokens=2, temperature=0)))
        while worker.engine.busy or worker.is_busy:
            outputs = worker.step()
            if outputs is not None:
                told += outputs.progress
                stats = outputs.stats or stats
        engine.close()
    last = told[-1]
    assert last.cached_tokens == sum(last.hits.values()) == 80
    assert last.hits == {"disk": 80}
    ((tier, start, end, tokens),) = last.loads
    assert (tier, tokens) == ("disk", 80)
    assert start < end <= last.started
    assert [use.name for use in stats.tiers] == ["host", "disk"]
    assert stats.offload["loaded_tokens"] == 80
    found = {
        sample.name: sample.value
        for family in text_string_to_metric_families(exposition(engine_series(stats, PoolInfo()), MODEL))
        for sample in family.samples
    }
    assert found["vllm:external_prefix_cache_hits_total"] == found["kvloom_loaded_tokens_total"] == 80
    assert found["vllm:prefix_cache_hits_total"] == 0
    assert found["kvloom_hit_tokens_total"] == 80


def test_a_series_without_our_name_has_vllms_only() -> None:
    text = exposition([Series("", "gauge", "help", 3.0, ("vllm:some",))], "m")
    assert text == '# HELP vllm:some help\n# TYPE vllm:some gauge\nvllm:some{engine="0",model_name="m"} 3.0\n'


def test_label_values_are_escaped() -> None:
    odd = 'a "quoted" \\ back\nline, é'
    text = exposition([Series("one", "counter", "help", {odd: 1}, ("two",), ("tenant",))], odd)
    ours, usual = (family.samples[0] for family in text_string_to_metric_families(text))
    assert ours.labels == {"tenant": odd}
    assert usual.labels == {"engine": "0", "model_name": odd, "tenant": odd}


def test_saved_seconds_follow_the_measured_time_per_computed_token() -> None:
    saved = SavedTime()
    saved.add(1000, 0, 0.010 + 1000 * 0.001, 0.0)
    assert saved.seconds == 0
    for computed, cached in ((10, 990), (200, 800), (1, 999)):
        saved.add(computed, cached, 0.010 + computed * 0.001, load_seconds=0.1)
    assert saved.seconds_per_token == pytest.approx(0.001)
    assert saved.seconds == pytest.approx(0.990 + 0.800 + 0.999 - 3 * 0.1)
    saved.add(1, 10, 0.011, load_seconds=5.0)  # a slow load saves nothing, and costs no earlier savings
    assert saved.seconds == pytest.approx(0.990 + 0.800 + 0.999 - 3 * 0.1)


def test_requests_of_equal_length_save_no_guessed_time() -> None:
    saved = SavedTime()
    for _ in range(5):
        saved.add(1, 999, 0.010, 0.0)
    assert saved.seconds == 0
