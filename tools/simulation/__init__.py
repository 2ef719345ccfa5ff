"""Deterministic simulation: the real engine, scheduler, offload manager and tiers in one process, from one seed.

    virtual_threads.py   VirtualThreads: threads, locks and clocks that one seed schedules
    stand_in_model.py    a model whose tokens are a function of what it reads through its pages
    faults.py            files, stores and copies that fail
    scenario.py          a scenario: settings and a list of operations, made from a seed
    engine_world.py      runs a scenario, and checks the invariants
    cluster_world.py     the same for the router, its index and several workers
    shrink.py            removes operations from a failing scenario
    command.py           `make simulate`

Run `python -m tools.simulation --seeds 100`. A failure prints its seed and a shrunk scenario, which `--replay` runs
again.
"""
