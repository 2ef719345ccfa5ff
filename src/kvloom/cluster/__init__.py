"""Several workers as one service.

    router/    one OpenAI endpoint over many workers: follows their events, chooses a worker for each request, and
               continues the streams of dead workers on other workers
    deploy/    `kvloom deploy`: routers and workers on Ray Serve

This package does not import torch.
"""

__all__: list[str] = []
