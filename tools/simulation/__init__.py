"""Deterministic simulation in one process, from one seed: the real engine with its tiers, and the real router.

    virtual_threads.py   VirtualThreads: threads, locks and clocks that one seed schedules
    stand_in_model.py    a model whose tokens are a function of what it reads through its pages
    faults.py            files, stores and copies that fail
    scenario.py          a scenario: settings and a list of operations, made from a seed
    engine_world.py      runs a scenario on an engine, and checks the invariants
    virtual_loop.py      VirtualLoop: an asyncio event loop with a virtual clock
    stand_in_worker.py   workers that answer, publish events, fail and restart in memory
    router_scenario.py   a scenario of the router
    router_world.py      runs a scenario on a router, and checks the invariants
    shrink.py            removes operations from a failing scenario
    command.py           `make simulate`

Run `python -m tools.simulation --seeds 100`. A failure prints its seed and a shrunk scenario, which `--replay` runs
again.
"""
