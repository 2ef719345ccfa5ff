"""The comparison of the adaptive policy with LRU: its figures, and how it switches the policy off and on."""

from __future__ import annotations

import random

import pytest

from kvloom.core.eviction import shadow as shadow_module
from kvloom.core.eviction.reuse_model import Floats, ReuseModel, Tables
from kvloom.core.eviction.shadow import ShadowLRU

from .test_adaptive import Service, learner

POOL = 200


def talk(service: Service, requests: int, seed: int = 3) -> None:
    """Serve conversations. One of the 20 newest continues, or a new one begins, so recent entries are used again."""
    draw = random.Random(seed)
    chats: list[list[int]] = []
    number = 1000
    for _ in range(requests):
        if len(chats) < 30 or draw.random() < 0.25:
            chats.append([1, 2])
        chat = chats.pop(-draw.randint(1, min(len(chats), 20)))
        for _ in range(draw.randint(1, 4)):
            number += 1
            chat.append(number)
        service.ask(*chat)
        service.wait(draw.uniform(1, 3))
        if len(chat) < 22 and draw.random() > 0.15:
            chats.append(chat)


def test_tokens_are_kept_by_last_use() -> None:
    shadow = ShadowLRU()
    for second in range(10):
        shadow.use(10, None, 1.0 + second)
    shadow.count(0, 0, 10, capacity=45)
    assert [shadow.share(1.0 + second) for second in range(10)] == [0.0] * 5 + [0.5] + [1.0] * 4
    shadow.use(10, 6.0, 20.0)  # the oldest kept tokens are used again
    shadow.count(0, 0, 10, capacity=45)
    assert [shadow.share(at) for at in (6.0, 7.0, 8.0, 20.0)] == [0.0, 0.5, 1.0, 1.0]


def test_the_figures_are_those_of_a_real_lru_cache() -> None:
    ours, lru = Service(POOL), Service(POOL, "lru")
    talk(ours, 1500)
    talk(lru, 1500)
    figures = ours.cache.inspect.policy
    assert figures["compared_tokens"] > 0.9 * 16 * ours.asked
    found = (figures["gained_tokens"] - figures["lost_tokens"]) / 16
    assert figures["gained_tokens"] > 0
    assert found == pytest.approx(ours.hits - lru.hits, abs=0.01 * ours.asked)
    assert lru.cache.inspect.policy == {}


def switched_off() -> ShadowLRU:
    """Return a comparison that has just switched its policy off."""
    shadow = ShadowLRU()
    while not shadow.is_off:
        shadow.count(0.0, 100.0, 1000, capacity=10_000)
    return shadow


def test_a_policy_with_a_predicted_gain_returns_before_its_loss_has_faded() -> None:
    shadow = switched_off()
    for gained in (50.0, 50.0, -50.0, 50.0):
        shadow.predict(gained)
        assert not shadow.count(0.0, 0.0, 1000, capacity=10_000), "four uses may be chance"
    for _ in range(5):
        shadow.predict(50.0)
    assert shadow.count(0.0, 0.0, 1000, capacity=10_000)
    assert not shadow.is_off
    assert shadow.loss > shadow_module.ON_LOSS
    while not shadow.is_off:
        shadow.count(0.0, 100.0, 1000, capacity=10_000)
    assert shadow.loss < 1.1 * shadow_module.LIMIT
    while shadow.is_off:
        shadow.predict(50.0)
        shadow.count(0.0, 0.0, 1000, capacity=10_000)
    assert shadow.loss <= shadow_module.ON_LOSS, "the predictions were wrong once"


def test_a_policy_with_a_predicted_loss_stays_off_until_its_loss_has_faded() -> None:
    shadow = switched_off()
    while shadow.is_off:
        shadow.predict(-50.0)
        shadow.count(0.0, 0.0, 1000, capacity=10_000)
    assert shadow.loss <= shadow_module.ON_LOSS


def reversed_index(self: ReuseModel, stratum: int, level: float, age: float) -> float:
    return age  # the most recently used entry is evicted first


def test_a_bad_order_is_switched_off_and_the_loss_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lru = Service(POOL, "lru")
    talk(lru, 4000)
    monkeypatch.setattr(ReuseModel, "index", reversed_index)
    guarded = Service(POOL)
    talk(guarded, 4000)
    monkeypatch.setattr(shadow_module, "OFF_LOSS", 1.0)
    unguarded = Service(POOL)
    talk(unguarded, 4000)
    assert unguarded.rate < lru.rate - 0.03
    assert guarded.rate > lru.rate - 0.005
    assert guarded.cache.inspect.policy["times_off"] >= 1


def test_predictions_of_a_bad_order_do_not_switch_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = ReuseModel._tables

    def reversed_tables(self: ReuseModel, baseline: Floats) -> Tables:
        index, lower = tables(self, baseline)
        return [[-value for value in row] for row in index], lower

    monkeypatch.setattr(ReuseModel, "_tables", reversed_tables)
    service = Service(POOL)
    policy = learner(service)
    seed = 0
    while not policy.shadow.is_off:
        talk(service, 50, seed := seed + 1)
        assert seed < 100
    talk(service, 400, seed + 1)
    assert policy.shadow.is_off
    assert policy.shadow._predicted < 0.0


def test_the_policy_reports_that_it_is_off_and_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    service = Service(POOL)
    index = ReuseModel.index
    monkeypatch.setattr(ReuseModel, "index", reversed_index)
    policy = learner(service)
    assert policy.name == "adaptive"
    seed = 0
    while not service.cache.inspect.policy["is_off"]:
        talk(service, 50, seed := seed + 1)
        assert seed < 100
    assert policy.name == "adaptive (off: LRU)"
    monkeypatch.setattr(ReuseModel, "index", index)
    while service.cache.inspect.policy["is_off"]:
        talk(service, 50, seed := seed + 1)
        assert seed < 400
    assert policy.name == "adaptive"
    service.cache.check()


def test_entries_used_before_the_policy_returned_are_ordered_by_last_use() -> None:
    service = Service(100)
    service.ask(1, 2, 3)
    service.wait(5)
    policy = learner(service)
    policy._on_since = service.clock.now()
    service.ask(7, 8, 9)
    now = service.clock.now()
    assert policy.priority(service.leaf(1, 2, 3), now)[0] == 0.0
    assert policy.priority(service.leaf(7, 8, 9), now)[0] == 1.0
