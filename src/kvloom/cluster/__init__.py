"""Several workers as one service.

router/    one OpenAI endpoint over many workers: follows their events, scores them, survives their deaths

Nothing here imports torch.
"""

__all__: list[str] = []
