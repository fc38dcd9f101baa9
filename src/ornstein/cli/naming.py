"""From what a user types to a process: the name of a preset, or matrices as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import ornstein
from ornstein import Linear, Process
from ornstein.training.choices import Diffusing
from ornstein.training.opening import open_model

Ends = tuple[float, float]  # a linear rate, at time 0 and at the horizon


def process(
    name: str,
    rate: Ends | None = None,
    horizon: float = 1.0,
    device: torch.device | None = None,
) -> Process:
    """A preset by its name, learned-N, learned-PRESET, or the process of a model, by its folder."""
    if is_model(name):
        if rate is not None:
            raise ValueError(f"--rate was given, but {name} is a trained model; leave --rate out.")
        return open_model(name).model.process.to(device)
    if "/" in name:
        raise ValueError(
            f"{name} is no folder of a run or of a saved model; expected one, or the name of a "
            "preset."
        )
    return Diffusing(process=name, rate=rate, horizon=horizon).build().to(device)


def is_model(path: str) -> bool:
    """Whether this is a folder with a model in it."""
    marks = ("checkpoints", "model.safetensors", "metrics.jsonl")
    return any((Path(path) / mark).exists() for mark in marks)


def own(
    Q: str,
    D: str,
    S: str | None = None,
    rate: Ends | None = None,
    rate_q: Ends | None = None,
    rate_d: Ends | None = None,
    v0_variance: str | None = None,
    horizon: float = 1.0,
) -> Process:
    """A process of the user's own, from matrices written as JSON."""
    options: dict[str, Any] = {} if v0_variance is None else {"v0_variance": variance(v0_variance)}
    return ornstein.Diffusion(
        matrix(Q, "Q"),
        matrix(D, "D"),
        None if S is None else matrix(S, "S"),
        rate=None if rate is None else Linear(*rate, horizon),
        rate_q=None if rate_q is None else Linear(*rate_q, horizon),
        rate_d=None if rate_d is None else Linear(*rate_d, horizon),
        horizon=horizon,
        name="own",
        **options,
    )


def matrix(text: str, what: str) -> list[list[float]]:
    """Nested lists from JSON; that they are a matrix is for the process to check."""
    expected = f"a list of rows such as --{what} '[[0,-1],[1,0]]'"
    value = _json(text, what, expected)
    if not (isinstance(value, list) and value and all(isinstance(row, list) for row in value)):
        raise ValueError(f"--{what} was given as {text!r}; expected {expected}.")
    return value


def variance(text: str) -> Any:
    """The variance of v₀: a number, a list with one for each variable, or a matrix."""
    expected = "a number, a list such as '[0.04,0.1]' or a matrix such as '[[0.04,0],[0,0.1]]'"
    value = _json(text, "v0-variance", expected)
    if isinstance(value, bool) or not isinstance(value, (int, float, list)):
        raise ValueError(f"--v0-variance was given as {text!r}; expected {expected}.")
    return value


def _json(text: str, what: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--{what} was given as {text!r}, which is not JSON ({error}); expected {expected}."
        ) from error
