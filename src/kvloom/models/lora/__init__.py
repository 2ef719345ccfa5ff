"""LoRA adapters on a base model. A batch may use many adapters, one per token.

| file          | content                                                                  |
|---------------|--------------------------------------------------------------------------|
| adapter_files | reads an adapter in PEFT's format, and computes its digest               |
| adapter_slots | stacked weights of the adapters on the device, as terms of linear layers |
"""

from .adapter_files import AdapterError, LoraAdapter, LowRankPair, read_adapter
from .adapter_slots import AdapterSlots

__all__ = ["AdapterError", "AdapterSlots", "LoraAdapter", "LowRankPair", "read_adapter"]
