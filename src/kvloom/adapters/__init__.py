"""Adapters: kvloom's cache and tiers inside other engines. One folder per engine."""
