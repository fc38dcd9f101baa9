"""A learned process that starts from another one is that one, and everything in it can move."""

from __future__ import annotations

import json

import pytest
import torch

import ornstein
from ornstein import Cosine, Diffusion, Linear, Monotone
from ornstein.parts import described, rebuilt
from ornstein.processes import LEAST, PRESETS, STARTS
from ornstein.reproduce.recipe import Bits
from ornstein.training.choices import Diffusing, as_learned
from tests.conformance.zoo import THREE_D, THREE_Q, TURN
from tests.test_errors import message, says

F64 = torch.float64
TWO_S = [[1.0, 0.2], [0.2, 2.0]]
TIMES = torch.tensor([1e-3, 0.03, 0.4, 1.0], dtype=F64)
OWN = Diffusion(
    TURN,
    [[1.0, 0.3], [0.3, 0.5]],
    S=TWO_S,
    rate_q=Cosine(4.0, horizon=2.0),
    rate_d=Linear(0.2, 5.0, 2.0),
    v0_variance=0.3,
    v0_coupling=0.5,
    horizon=2.0,
    name="mine",
)


def same(first: Diffusion, other: Diffusion, atol: float = 0.0) -> None:
    times = TIMES * first.horizon
    one, two = first.transition(times), other.transition(times)
    for name in ("propagator", "cholesky"):
        torch.testing.assert_close(getattr(one, name), getattr(two, name), rtol=1e-12, atol=atol)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", STARTS)
def test_it_is_its_start_with_a_little_noise(name: str, full: bool) -> None:
    start = PRESETS[name]()
    assert isinstance(start, Diffusion)
    process = ornstein.learned(start=start, full=full)
    noise = start.D.diagonal()
    D = torch.diag(torch.where(noise > 0, noise, LEAST * noise.max()))
    torch.testing.assert_close(process.Q, start.Q, rtol=0, atol=0)
    torch.testing.assert_close(process.D, D, rtol=1e-15, atol=0)
    assert process.name == f"learned-{name}" + ("-full" if full else "")
    law = (start.auxiliary.factor() @ start.auxiliary.factor().mT)[1:, 1:]
    same(process, Diffusion(start.Q, D, S=start.S, v0_variance=law), atol=1e-15)
    if not bool((noise == 0).any()):
        same(process, start, atol=1e-15)


@pytest.mark.parametrize("name", STARTS)
def test_all_of_it_can_be_learned(name: str) -> None:
    """A gradient for every entry: of D also where the start has no noise."""
    process = ornstein.learned(
        start=PRESETS[name](),  # type: ignore[arg-type]
        learn_rates="separate",
        learn_v0_variance=PRESETS[name]().n_vars > 1,
    )
    kernel = process.transition(TIMES)
    kernel.logsnr.sum().backward()
    raw = process.get_parameter("make_D.raw")
    assert raw.grad is not None and bool((raw.grad != 0).all())
    turns = process.get_parameter("make_Q.raw").grad
    assert turns is not None
    if process.n_vars > 1:
        below = turns[1:, :].diagonal()  # each variable turns into the next
        assert bool((below != 0).all())
    clock = process.get_parameter("rate_d.logits").grad
    assert clock is not None and bool((clock != 0).any())


def test_a_process_of_ones_own() -> None:
    """Clocks, law of v₀, horizon and a full D are taken over, and it stays as it was."""
    process = ornstein.learned(start=OWN, full=True)
    assert process.horizon == 2.0 and process.name == "learned-mine-full" and process.learned
    torch.testing.assert_close(process.D, OWN.D, rtol=1e-14, atol=0)
    same(process, OWN, atol=1e-14)
    with torch.no_grad():
        for value in process.parameters():
            value.add_(0.1)
    assert not OWN.learned and OWN.Q.tolist() == TURN
    again = rebuilt(json.loads(json.dumps(described(process))), "it", Diffusion)
    again.load_state_dict(process.state_dict())
    same(again, process)


def test_what_is_given_is_not_taken_over() -> None:
    start = ornstein.cld(rate=Linear(0.1, 10.0))
    process = ornstein.learned(1, start=start, rate=Linear(0.1, 20.0), v0_variance=0.5, S=TWO_S)
    D = [[LEAST, 0.0], [0.0, 1.0]]
    same(process, Diffusion(start.Q, D, S=TWO_S, v0_variance=0.5), atol=1e-15)


def test_a_learned_process_can_be_a_start() -> None:
    first = ornstein.learned(2, seed=3)
    process = ornstein.learned(start=first)
    same(process, first, atol=1e-15)
    assert not {id(p) for p in process.parameters()} & {id(p) for p in first.parameters()}


def test_clocks() -> None:
    shared = ornstein.learned(start=ornstein.cld(), learn_rates="shared")
    assert shared.rate_q is shared.rate_d and isinstance(shared.rate_d, Monotone)
    own = ornstein.learned(start=OWN, full=True, learn_rates="separate")
    assert isinstance(own.rate_q, Monotone) and isinstance(own.rate_q.base, Cosine)
    assert isinstance(own.rate_d, Monotone) and isinstance(own.rate_d.base, Linear)


def test_names() -> None:
    """As they are typed."""
    assert as_learned("learned-2") == (2, False) and as_learned("learned-2-full") == (2, True)
    assert as_learned("learned-alda-full") == ("alda", True)
    assert as_learned("learned-nothing") is None and as_learned("learned-") is None
    process = Diffusing("learned-malda", rate=(0.1, 10.0), v0_variance=0.2).build()
    start = ornstein.malda(rate=Linear(0.1, 10.0), v0_variance=0.2)
    same(process, ornstein.learned(start=start))  # type: ignore[arg-type]
    assert as_learned("learned-vesde") is None  # it has no Q and D
    for name, meant in (
        ("learned-cldd", "learned-cld"),
        ("learned-malda-ful", "learned-malda-full"),
        ("learned-psdl", "learned-psld"),
    ):
        says(message(lambda name=name: Diffusing(name).build()), f"{name!r}", f"meant {meant!r}")
        says(message(lambda name=name: Bits(process=(name,))), f"{name!r}", f"meant {meant!r}")
    says(message(lambda: Diffusing("learned-vesde").build()), "learned-P", "vpsde, cld, psld, alda")
    stranger = Diffusing("learned-vpsde", v0_variance=0.1)  # K = 1
    says(message(stranger.build), "'learned-vpsde' has no v0_variance", "Leave v0_variance out")
    assert Bits(process=("learned-cld", "learned-2-full")).process[0] == "learned-cld"
    assert set(STARTS) == {n for n, make in PRESETS.items() if isinstance(make(), Diffusion)}


@pytest.mark.parametrize(
    ("D", "missing"),
    [
        ([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], 2),
        ([[1.0, 0.5, 0.0], [0.5, 0.25, 0.0], [0.0, 0.0, 0.0]], 2),
        ([[1e-18, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, 0.5, 0.25]], 1),  # little is not nothing
        ([[1.0, 0.5, 0.0], [0.5, 0.25, 0.0], [0.0, 0.0, 1e-18]], 1),
        ([[2.0, 0.3, 0.1], [0.3, 1.0, 0.2], [0.1, 0.2, 0.5]], 0),
    ],
)
def test_noise_in_every_direction(D: list[list[float]], missing: int) -> None:
    """A full D of whatever rank: what it lacks is added there alone, and all of it can move."""
    start = Diffusion(THREE_Q, D)
    process = ornstein.learned(start=start, full=True)
    added = process.D.detach() - start.D
    noise = [0.0] * (3 - missing) + [LEAST * max(D[0][0], D[1][1])] * missing
    wanted = torch.tensor(noise, dtype=F64)
    # to rounding of D's largest entry
    torch.testing.assert_close(torch.linalg.eigvalsh(added), wanted, rtol=0, atol=1e-15)
    assert (start.D @ added).abs().max() < 1e-15  # where it has noise nothing is added
    for i in (0, 2):
        if D[i][i] == 1e-18:
            assert process.D[i, i].item() == pytest.approx(1e-18, rel=1e-9)
    process.transition(TIMES).logsnr.sum().backward()
    raw = process.get_parameter("make_D.raw").grad
    assert raw is not None and bool((raw != 0).any(0).all())


def test_a_law_that_was_learned() -> None:
    """Of a start that has moved: a covariance of v₀ that is not diagonal, a coupling."""
    first = ornstein.learned(
        2,
        full=True,
        v0_variance=[[0.3, 0.1], [0.1, 0.2]],
        v0_coupling=[0.1, -0.2],
        learn_v0_variance=True,
        learn_v0_coupling=True,
    )
    with torch.no_grad():
        for i, value in enumerate(first.parameters()):
            value.add_(0.05 * (i + 1))
    process = ornstein.learned(start=first, full=True)
    same(process, first, atol=1e-14)
    torch.testing.assert_close(
        process.transition(TIMES).response, first.transition(TIMES).response, rtol=1e-12, atol=1e-14
    )


def test_mistakes() -> None:
    cld = ornstein.cld()
    says(message(lambda: ornstein.learned(start="cld")), "start='cld'", "ornstein.cld()")  # type: ignore[arg-type]
    says(message(lambda: ornstein.learned(2, start=cld)), "n_aux=2", "1 auxiliary", "Leave n_aux")
    says(message(lambda: ornstein.learned(start=cld, horizon=2.0)), "horizon=2.0", "runs to 1")
    says(message(lambda: ornstein.learned(start=OWN)), "not diagonal", "mine", "full=True")
    own = message(lambda: ornstein.learned(start=OWN, full=True, learn_rates="shared"))
    says(own, "clocks of their own", "separate")
    equal = Diffusion(TURN, [[1.0, 0.0], [0.0, 1.0]], rate_q=Linear(), rate_d=Linear())
    shared = ornstein.learned(start=equal, learn_rates="shared")
    assert shared.rate_q is shared.rate_d
    says(message(lambda: ornstein.learned(start=cld, horizon=-1.0)), "horizon was given as -1")
    says(message(lambda: ornstein.learned(start=ornstein.vesde())), "start='vesde'", "Q and D")  # type: ignore[arg-type]
    clocked = ornstein.learned(1, learn_rates="shared")
    says(message(lambda: ornstein.learned(start=clocked)), "rates are learned", "rate=")
    three = Diffusion(THREE_Q, THREE_D)
    assert ornstein.learned(start=three, full=True).n_vars == 3
