"""Several workers as one service.

    router/    one OpenAI endpoint over many workers: follows their events, scores them, continues streams of dead workers

This package does not import torch.
"""

__all__: list[str] = []
