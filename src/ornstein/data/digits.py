"""The default data: 1,797 real handwritten digits, 8 × 8 pixels of 17 levels, in this package.

digits.md beside this file says where they come from, and under which licence.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ornstein.data.sets import Dataset, Split, shuffled

LEVELS, TEST, VALID = 17, 300, 150
SOURCE = (
    "Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak (1998), UCI Machine "
    "Learning Repository, doi:10.24432/C50P49, CC BY 4.0"
)
_SEED = 1998  # of the splits, whatever the user's seed is


def digits(valid: int | None = None) -> Dataset:
    """Always the same 300 for the test, then `valid` (150) for validation, and the rest."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as arrays:
        x = torch.from_numpy(arrays["images"]).unsqueeze(1)  # (N, 1, 8, 8)
        labels = torch.from_numpy(arrays["labels"]).to(torch.int64)
    end = TEST + (VALID if valid is None else valid)
    if end >= len(x):
        raise ValueError(
            f"valid={valid} leaves nothing of the {len(x) - TEST} digits to train on; expected "
            "fewer."
        )
    order = balanced(labels)
    whole = Split(x[order], labels[order])
    test, held, train = whole[:TEST], whole[TEST:end], whole[end:]
    return Dataset("digits", train, held, test, LEVELS, SOURCE)


def balanced(labels: Tensor) -> Tensor:
    """A fixed order in which any first n examples have all classes in proportion: (N,)."""
    order = shuffled(len(labels), _SEED, "split")
    classes = labels[order]
    member = torch.nn.functional.one_hot(classes)  # (N, classes)
    rank = (member.cumsum(0) * member).sum(1)  # 1 for the first of its class, and so on
    return order[((rank - 0.5) / member.sum(0)[classes]).argsort(stable=True)]
