"""A model as a folder to share: what it is, its numbers, and a card for whoever finds it.

    config.json          the model's description, its data, what was measured, versions
    model.safetensors    the numbers of its state dict; a tensor that has two names is stored once
    README.md            the card, as the Hugging Face Hub shows it

`ScoreModel.save_pretrained`, `from_pretrained` and `push_to_hub` are what users call. Nothing is
unpickled, and nothing is built that `parts` does not list.
"""

from ornstein.sharing.folder import Shared, numbers_of, read, write
from ornstein.sharing.hub import push
from ornstein.sharing.loading import building, given_or_rebuilt, load, name_or_description

__all__ = [
    "Shared",
    "building",
    "given_or_rebuilt",
    "load",
    "name_or_description",
    "numbers_of",
    "push",
    "read",
    "write",
]
