"""Continuous batching: requests in, tokens out. Models run on the cache's pages; nothing here knows their kinds."""
