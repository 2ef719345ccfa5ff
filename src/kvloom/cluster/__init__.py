"""Several workers as one service.

    router/    one OpenAI endpoint over many workers: follows their events, scores them, continues streams of dead workers
    deploy/    `kvloom deploy`: routers and workers on Ray Serve

This package does not import torch.
"""

__all__: list[str] = []
