"""KvloomTier: a tier below vLLM's own CPU offloading. Written in a later step."""

__all__ = ["KvloomTier"]


class KvloomTier:
    pass
