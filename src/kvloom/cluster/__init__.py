"""Several workers as one service.

router/    one OpenAI endpoint over many workers: follows their events, scores them, survives their deaths
deploy/    `kvloom deploy`: routers and workers on Ray Serve

Nothing here imports torch.
"""

__all__: list[str] = []
