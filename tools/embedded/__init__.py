"""How the embedded models are made: text, tokenizer, shapes, training, folders. `tools/train_embedded.py` is the way in.

Stands outside the package: nothing of kvloom imports it, and it imports nothing of kvloom.
"""

__all__: list[str] = []
