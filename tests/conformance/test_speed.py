"""What makes a step fast changes nothing: tables that are held, solutions that are written out."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import ornstein
from ornstein import clock, linalg
from ornstein.data import Stream
from ornstein.training import Objective, Training

F64 = torch.float64


def used(process: ornstein.Process, held: bool) -> tuple[Tensor, list[Tensor | None]]:
    """A number made of three kernels, and its gradients."""
    if held:
        process.hold()
    try:
        times = torch.tensor([0.01, 0.2, 0.9], dtype=F64)
        early = process.time_of_noise(0.05)
        kernels = [process.transition(times), process.transition(1.0), process.transition(early)]
        value = sum(k.logdet.sum() + k.response.square().sum() for k in kernels)
    finally:
        process.release()
    assert isinstance(value, Tensor)
    found = torch.autograd.grad(value, list(process.parameters()), allow_unused=True)
    return value.detach(), list(found)


@pytest.mark.parametrize("rates", ["no", "shared"])
@pytest.mark.parametrize("aux", [0, 1, 2])
def test_held_tables(aux: int, rates: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One table for all kernels of a step, the same numbers and the same gradients."""
    torch.manual_seed(aux)
    process = ornstein.learned(aux, learn_rates=rates)
    for p in process.parameters():
        p.data += 0.1 * torch.randn_like(p)
    process.replan()
    built, tabulate = [], clock._tabulate

    def counted(*args: object) -> object:
        built.append(1)
        return tabulate(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(clock, "_tabulate", counted)
    value, gradients = used(process, held=False)
    often = len(built)
    built.clear()
    again, held = used(process, held=True)
    assert often > 3 and len(built) == 1
    torch.testing.assert_close(again, value, rtol=1e-13, atol=0)
    for one, other in zip(held, gradients, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("turned", [False, True], ids=["L", "Lᵀ"])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
def test_written_out(K: int, turned: bool) -> None:
    """As LAPACK does it, with its gradient; also a matrix for a whole batch."""
    torch.manual_seed(K)
    L = torch.randn(7, K, K, dtype=F64).tril()
    L.diagonal(dim1=-2, dim2=-1).abs_().add_(0.5)
    for matrix in (L, L[0]):
        right = torch.randn(7, K, 3, dtype=F64)
        leaves = [t.clone().requires_grad_() for t in (matrix, right)]
        found, wanted = (f(*leaves, turned) for f in (linalg.written_out, linalg.lower_solve))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        gradient = torch.randn_like(found)
        one, other = (torch.autograd.grad(t, leaves, gradient) for t in (found, wanted))
        torch.testing.assert_close(one[0].tril(), other[0].tril(), rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(one[1], other[1], rtol=1e-11, atol=1e-12)


def test_rows_go_where_they_are_told() -> None:
    """Across the end of an epoch, too; `take` is rows and their flips."""
    x = torch.arange(5 * 12, dtype=torch.uint8).reshape(5, 1, 3, 4)
    stream = Stream(x, 3, flips=True)
    out = torch.empty(4, 1, 3, 4, dtype=torch.uint8)
    for first in (0, 3, 8):
        found = stream.rows(first, 4, out=out)
        assert found is out and torch.equal(out, stream.rows(first, 4))
        positions = torch.arange(first, first + 4)
        assert torch.equal(stream.mirrored(out, positions), stream.take(first, 4))


def test_implicit_matching_is_not_compiled() -> None:
    cuda = torch.device("cuda")
    assert not Training(objective=Objective("mism")).compiled_on(cuda)
    assert Training(compile="on").compiled_on(cuda)
    with pytest.raises(ValueError, match=r"compile='on' with objective='mism'.*compile='off'"):
        Training(compile="on", objective=Objective("mism"))


def test_imported_anew() -> None:
    """Operators are torch's for as long as it lives; a notebook may import them again."""
    code = (
        "import sys, ornstein\n"
        "for name in [n for n in sys.modules if n.startswith('ornstein')]: del sys.modules[name]\n"
        "import ornstein\n"
        "print(ornstein.vpsde().transition(0.5).logsnr.item())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    wanted = ornstein.vpsde().transition(0.5).logsnr.item()
    assert float(found.stdout) == wanted


def test_a_step_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed as it is, with a warning, and nothing is lost."""
    compile_ = torch.compile

    def broken(graph: object, inputs: object) -> object:
        raise RuntimeError("no C compiler was found")

    def losses(how: Any) -> list[float]:
        torch.manual_seed(0)
        network = ornstein.networks.MLP((2,), width=8, dropout=0.1)
        model = ornstein.ScoreModel(network, ornstein.vpsde(), ornstein.Continuous())
        x = torch.randn(32, 2)
        return [step.loss for step in ornstein.fit(model, x, Training(3, 8, compile=how))]

    wanted = losses("off")
    monkeypatch.setattr(torch, "compile", lambda loss, **_: compile_(loss, backend=broken))
    with pytest.warns(UserWarning, match=r"can't be compiled.*going on without.*--compile off"):
        assert losses("on") == wanted
