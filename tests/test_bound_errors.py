"""Mistakes with data, models and bounds: a ValueError that says what, what else, and how to fix it.

The words that are asserted are what was given, what is expected, and, where there is something to
do, what to do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ornstein
from ornstein import (
    Adaptive,
    Continuous,
    Counted,
    Discrete,
    FixedTime,
    Generated,
    Importance,
    Likelihood,
    LogSNR,
    NoiseLevel,
    Process,
    ScoreModel,
    Tweedie,
    Uniform,
    elbo,
    mism,
    noise_prediction,
    score_matching,
)
from ornstein.times import Information
from tests.test_errors import message, says

NAN = float("nan")
BYTES = torch.arange(24, dtype=torch.uint8).reshape(4, 6)
REAL = torch.linspace(-1, 1, 24).reshape(4, 6)


class Returns(nn.Module):
    """A network that does something to its input."""

    def __init__(self, function: Callable[[Tensor], Any] = torch.zeros_like) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, logsnr: Tensor) -> Any:
        return self.function(x)


def model(
    function: Callable[[Tensor], Any] = torch.zeros_like,
    process: Process | None = None,
    **options: Any,
) -> ScoreModel:
    return ScoreModel(Returns(function), ornstein.cld() if process is None else process, **options)


LOSSES: list[Callable[..., Any]] = [elbo, mism, score_matching, noise_prediction]
all_losses = pytest.mark.parametrize("loss", LOSSES)


# ---------------------------------------------------------------- data


@all_losses
def test_pixels_outside_the_levels(loss: Callable[..., Any]) -> None:
    text = message(lambda: loss(model(), BYTES.long() + 240))
    says(text, "from 240 to 263", "0 … 255", "256 levels", "levels=264", "quantise")
    says(message(lambda: loss(model(), BYTES.long() - 3)), "from -3 to 20", "0 … 255")
    says(message(lambda: loss(model(likelihood=Discrete(16)), BYTES)), "from 0 to 23", "levels=24")
    says(message(lambda: loss(model(likelihood=Tweedie(16)), BYTES)), "from 0 to 23", "0 … 15")


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_pixels_of_unsigned_types(dtype: torch.dtype) -> None:
    """Sixteen-bit images are often stored so: they are data, or a mistake that is explained."""
    wide = (BYTES.long() + 240).to(dtype)
    says(message(lambda: elbo(model(), wide)), "263", "0 … 255")
    bound = elbo(model(likelihood=Discrete(512)), wide)
    assert bool(bound.nats.isfinite().all())


@all_losses
def test_pixels_that_are_not_whole(loss: Callable[..., Any]) -> None:
    for likelihood in (Discrete(), Tweedie(), Tweedie(logit=0.05)):
        for scaled in (BYTES / 255, BYTES.double(), BYTES.to(torch.float16)):
            text = message(lambda lik=likelihood, x=scaled: loss(model(likelihood=lik), x))
            says(text, str(scaled.dtype), "integer type", "0 … 255", "uint8", "Continuous()")
    text = message(lambda: loss(model(), BYTES > 3))
    says(text, "torch.bool", "integer type", "0 … 255")
    says(message(lambda: loss(model(), BYTES.to(torch.complex64))), "torch.complex64")


@all_losses
def test_numbers_that_are_not_real(loss: Callable[..., Any]) -> None:
    for likelihood in (Continuous(), Tweedie(None)):
        real = model(likelihood=likelihood)
        for bad in (BYTES, BYTES.long(), BYTES > 3, REAL.to(torch.complex64)):
            text = message(lambda real=real, x=bad: loss(real, x))
            says(text, str(bad.dtype), "floating point", "Discrete(levels)")
        for value in (NAN, math.inf, -math.inf):
            broken = REAL.clone()
            broken[2, 3] = value
            says(message(lambda real=real, x=broken: loss(real, x)), "NaN or infinite", "finite")


@all_losses
def test_shapes_of_data(loss: Callable[..., Any]) -> None:
    for flat in (BYTES[0], BYTES[0, 0]):
        text = message(lambda x=flat: loss(model(), x))
        says(text, f"shape {tuple(flat.shape)}", "(batch, *data)", "unsqueeze")
    text = message(lambda: loss(model(likelihood=Continuous()), REAL[0]))
    says(text, "(6,)", "(batch, *data)", "unsqueeze")


@pytest.mark.parametrize("bad", [BYTES.numpy(), BYTES.tolist(), None, "image.png"])
def test_data_that_is_no_tensor(bad: Any) -> None:
    for loss in LOSSES:
        text = message(lambda loss=loss: loss(model(), bad))
        says(text, type(bad).__name__, "torch tensor", "torch.as_tensor")
    says(message(lambda: elbo(model(likelihood=Continuous()), bad)), "torch tensor")


def test_data_on_another_device() -> None:
    says(
        message(lambda: elbo(model(), BYTES.to("meta"))), "meta", "cpu", "one device", ".to(device)"
    )


def test_data_that_does_not_fit_its_moments() -> None:
    for options, word in (
        ({"data_mean": torch.zeros(3)}, "data_mean of shape (3,)"),
        ({"data_std": torch.ones(5)}, "data_std of shape (5,)"),
        ({"data_std": torch.ones(4, 6)}, "data_std of shape (4, 6)"),
        ({"data_mean": torch.zeros(3, 1, 1)}, "data_mean of shape (3, 1, 1)"),
    ):
        text = message(lambda options=options: elbo(model(**options), BYTES))
        says(text, "shape (4, 6)", word, "broadcasts to (6,)")


def test_moments_of_data_that_is_none() -> None:
    says(message(lambda: Discrete().moments(REAL)), "torch.float32", "integer type")
    says(message(lambda: Continuous().moments(BYTES)), "torch.uint8", "floating point")
    says(message(lambda: Discrete().moments([1, 2])), "list", "tensor")  # type: ignore[arg-type]


# ---------------------------------------------------------------- networks


@all_losses
@pytest.mark.parametrize("parametrisation", ["channel", "joint"])
def test_networks_that_return_something_else(
    loss: Callable[..., Any], parametrisation: str
) -> None:
    shape = "(4, 6)" if parametrisation == "channel" else "(4, 2, 6)"
    end = "data's own shape" if parametrisation == "channel" else "all 2 variables"
    for function, found in (
        (lambda x: x[..., :3], "3)"),
        (lambda x: x.flatten(), "(24,)" if parametrisation == "channel" else "(48,)"),
        (lambda x: x.unsqueeze(0), "(1, 4,"),
        (lambda x: (x, x), "tuple"),
        (lambda x: None, "NoneType"),
        (lambda x: x.tolist(), "list"),
    ):
        wrong = model(function, parametrisation=parametrisation)
        text = message(lambda wrong=wrong: loss(wrong, BYTES))
        says(text, "the network returned", found, f"expected {shape}", end)
    if parametrisation == "joint":
        text = message(lambda: loss(model(lambda y: y[:, 0], parametrisation="joint"), BYTES))
        says(text, "returned (4, 6)", "expected (4, 2, 6)", "parametrisation='joint'")


def test_networks_that_return_something_else_with_features() -> None:
    """Their input has more channels than their output may have."""
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    for parametrisation in ("channel", "joint"):
        wrong = model(lambda x: x, parametrisation=parametrisation, features="bins")
        text = message(lambda wrong=wrong: elbo(wrong, images))
        says(text, "the network returned (2, 5" if parametrisation == "channel" else "(2, 6")


@pytest.mark.parametrize("bad", [None, "unet", 3])
def test_networks_that_are_none(bad: Any) -> None:
    text = message(lambda: ScoreModel(bad, ornstein.cld()))
    says(text, f"network was given as {type(bad).__name__}", "(x, logsnr)")


def test_answers_for_the_wrong_parametrisation() -> None:
    joint = model(parametrisation="joint")
    for call in (joint.predict, joint.denoise):
        text = message(lambda call=call: call(REAL, torch.zeros(4)))
        says(text + " expected", "'channel'", "this model is joint", "noise(y, s)")


def test_states_that_do_not_fit() -> None:
    for call in (model().noise, model().score):
        text = message(lambda call=call: call(torch.zeros(4, 3, 6), 0.5))
        says(text, "(4, 3, 6)", "(4, 2, 6)")
        says(
            message(lambda call=call: call(torch.zeros(4, 2, 6), torch.tensor([0.1, 0.2]))), "(2,)"
        )
        says(message(lambda call=call: call(torch.zeros(4, 2, 6), 1.5)), "s = 1.5", "0 ≤ s ≤ 1")
        says(message(lambda call=call: call(torch.zeros(4, 2, 6), 0.0)), "s > 0")


# ---------------------------------------------------------------- truncation


BOTH = pytest.mark.parametrize("parametrisation", ["channel", "joint"])
REALS: list[tuple[Likelihood, Tensor]] = [
    (Discrete(), BYTES),
    (Tweedie(), BYTES),
    (Tweedie(logit=0.05), BYTES),
    (Continuous(), REAL),
]
KINDS = pytest.mark.parametrize(
    ("likelihood", "x"), REALS, ids=[repr(likelihood) for likelihood, _ in REALS]
)


@BOTH
@KINDS
def test_more_noise_than_there_is(likelihood: Likelihood, x: Tensor, parametrisation: str) -> None:
    for name, most in (("vpsde", "152"), ("vesde", "50")):
        cut = model(
            process=ornstein.PRESETS[name](),
            likelihood=likelihood,
            parametrisation=parametrisation,
            truncation=NoiseLevel(1e4),
        )
        text = message(lambda cut=cut: elbo(cut, x))
        says(
            text, "standard error of 10000 can't be met", name, f"to {most} at", "horizon", "choose"
        )
        says(message(lambda cut=cut: mism(cut, x)), "can't be met")
        says(message(lambda cut=cut: score_matching(cut, x)), "can't be met")


@BOTH
@KINDS
def test_less_noise_than_there_is(likelihood: Likelihood, x: Tensor, parametrisation: str) -> None:
    """Also where the bound could do without the time: the same request has the same answer."""
    cut = model(
        likelihood=likelihood, parametrisation=parametrisation, truncation=NoiseLevel(1e-60)
    )
    says(message(lambda: elbo(cut, x)), "1e-60 can't be met", "'cld'", "shortly after the start")


@BOTH
@KINDS
@pytest.mark.parametrize("s", [1.0, 3.0])
def test_times_after_the_end(
    likelihood: Likelihood, x: Tensor, parametrisation: str, s: float
) -> None:
    cut = model(likelihood=likelihood, parametrisation=parametrisation, truncation=FixedTime(s))
    for loss in LOSSES:
        text = message(lambda loss=loss: loss(cut, x))
        says(text, f"truncated at s = {s:g}", "'cld' ends at 1", "earlier time")


@pytest.mark.parametrize("bad", [0, -0.1, NAN, math.inf, "early", None])
def test_truncations_that_are_no_numbers(bad: Any) -> None:
    says(message(lambda: NoiseLevel(bad)), "standard_error", repr(bad), "positive")
    says(message(lambda: FixedTime(bad)), "s was given", repr(bad), "positive")


@pytest.mark.parametrize("bad", [0.001, "noise", NoiseLevel, torch.tensor(0.1)])
def test_truncations_that_are_none(bad: Any) -> None:
    says(message(lambda: model(truncation=bad)), "truncation=", "NoiseLevel(standard_error)")
    text = message(lambda: model().with_truncation(bad))
    says(text, "truncation=", "NoiseLevel(standard_error)", "FixedTime(s)")


@pytest.mark.parametrize("bad", [0.001, "noise", NoiseLevel])
def test_truncations_of_a_call(bad: Any) -> None:
    for loss in LOSSES:
        text = message(lambda loss=loss: loss(model(), BYTES, truncation=bad))
        says(text, "truncation=", "NoiseLevel", "FixedTime")


def test_singular_start_of_the_auxiliary_variables() -> None:
    """The paper's bound needs their entropy; ours does not."""
    for variance in (0.0, [[1.0, 1.0], [1.0, 1.0]]):
        process = ornstein.alda(v0_variance=variance)
        for given in ("x", "state"):
            singular = model(process=process, likelihood=Tweedie())
            text = message(lambda given=given, m=singular: elbo(m, BYTES, given=given))
            says(text, "entropy of v₀", "singular", "v0_variance", "discrete bound")
        assert bool(elbo(model(process=process), BYTES).nats.isfinite().all())


# ---------------------------------------------------------------- arguments of a bound


@all_losses
@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "2", None])
def test_draws(loss: Callable[..., Any], bad: Any) -> None:
    says(message(lambda: loss(model(), BYTES, draws=bad)), f"draws={bad!r}", "whole number ≥ 1")


@all_losses
@pytest.mark.parametrize("bad", ["uniform", Uniform, 3, ["uniform"]])
def test_times(loss: Callable[..., Any], bad: Any) -> None:
    text = message(lambda: loss(model(), BYTES, times=bad))
    says(text, f"times={bad!r}", "Uniform()", "Importance()", "LogSNR()", "Adaptive()")


@pytest.mark.parametrize("loss", [elbo, score_matching, noise_prediction])
@pytest.mark.parametrize("bad", ["y", None, 1])
def test_given(loss: Callable[..., Any], bad: Any) -> None:
    says(message(lambda: loss(model(), BYTES, given=bad)), f"given={bad!r}", "'x'", "'state'")


@pytest.mark.parametrize("bad", ["hutchinson", None, 3])
def test_divergence(bad: Any) -> None:
    text = message(lambda: mism(model(), BYTES, divergence=bad))
    says(text, f"divergence={bad!r}", "'auto'", "'exact'", "'rademacher'", "'gaussian'")


@pytest.mark.parametrize("times", [Uniform, Importance, LogSNR, Information, Adaptive])
@pytest.mark.parametrize("bad", ["even", None, 3])
def test_spread(times: Any, bad: Any) -> None:
    text = message(lambda: times(spread=bad))
    says(text, f"spread={bad!r}", "independent", "stratified", "antithetic")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bins": 0}, ("bins=0", "≥ 1")),
        ({"bins": 2.5}, ("bins=2.5", "whole number")),
        ({"decay": 0.0}, ("decay=0.0", "between 0 and 1")),
        ({"decay": 1.0}, ("decay=1.0", "between 0 and 1")),
        ({"floor": 0.0}, ("floor=0.0", "0 < floor ≤ 1", "all times are seen")),
        ({"floor": 1.5}, ("floor=1.5", "0 < floor ≤ 1")),
        ({"floor": NAN}, ("floor=nan", "0 < floor ≤ 1")),
        ({"floor": "a"}, ("floor='a'", "0 < floor ≤ 1")),
    ],
)
def test_adaptive(options: dict[str, Any], words: tuple[str, ...]) -> None:
    says(message(lambda: Adaptive(**options)), *words)
    if "floor" in options:
        says(message(lambda: Information(**options)), *words)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adaptive("importance"),
        lambda: Adaptive(LogSNR),
        lambda: Adaptive(decay="slow"),
        lambda: Adaptive(bins=True),
        lambda: Importance("vpsde"),
        lambda: Importance(ornstein.vpsde),
    ],
    ids=["base str", "base class", "decay str", "bins bool", "process str", "process function"],
)
def test_parts_of_proposals(make: Callable[[], Any]) -> None:
    """Refused when they are built, or when they are used; by a message, not by an accident."""
    says(message(lambda: elbo(model(), BYTES, times=make())))


@pytest.mark.parametrize("loss", [elbo, mism])
@pytest.mark.parametrize("bad", ["discrete", Discrete, 256])
def test_likelihood_of_a_call(loss: Callable[..., Any], bad: Any) -> None:
    text = message(lambda: loss(model(), BYTES, likelihood=bad))
    says(text, f"likelihood={bad!r}", "Discrete", "Tweedie", "Continuous")


SPACES: list[tuple[Likelihood, str]] = [
    (Discrete(256), "bytes"),
    (Tweedie(256), "bytes"),
    (Discrete(16), "sixteen"),
    (Tweedie(16), "sixteen"),
    (Discrete(256, 0.05), "bytes, logit"),
    (Tweedie(256, 0.05), "bytes, logit"),
    (Tweedie(None), "numbers"),
    (Continuous(), "numbers"),
]


@pytest.mark.parametrize("bound", SPACES, ids=lambda pair: repr(pair[0]))
@pytest.mark.parametrize("built", SPACES, ids=lambda pair: repr(pair[0]))
def test_likelihood_of_another_space(
    built: tuple[Likelihood, str], bound: tuple[Likelihood, str]
) -> None:
    """A model for one kind of numbers, asked for a bound on another; alike, it is no mistake."""
    x = REAL if bound[1] == "numbers" else BYTES % 16

    def call() -> Any:
        return elbo(model(likelihood=built[0]), x, likelihood=bound[0])

    if built[1] == bound[1]:
        assert call().name == bound[0].name
    else:
        says(message(call), repr(built[0]), repr(bound[0]), "same levels", "logit map")


@all_losses
def test_random_numbers_for_another_batch(loss: Callable[..., Any]) -> None:
    for random in (Counted(0, torch.arange(3)), Generated(5, torch.device("cpu"))):
        text = message(lambda random=random: loss(model(), BYTES, random=random))
        says(text, f"for {random.size} examples", "batch has 4", "equal")


@pytest.mark.parametrize(
    "bad", ["seed", 1.5, np.random.default_rng(0)], ids=["str", "1.5", "numpy"]
)
def test_random_numbers_from_elsewhere(bad: Any) -> None:
    for loss in LOSSES:
        text = message(lambda loss=loss: loss(model(), BYTES, random=bad))
        says(text, "random=", "torch.Generator", "Counted")


@pytest.mark.parametrize("loss", [score_matching, noise_prediction])
def test_weightings(loss: Callable[..., Any]) -> None:
    text = message(lambda: loss(model(), BYTES, weighting=lambda s: -s))
    says(text, "weighting is negative (-", "≥ 0")
    for function, shape in (
        (lambda s: s[:2], "(2,)"),
        (lambda s: s.unsqueeze(-1), "(4, 1)"),
        (lambda s: [1.0, 2.0], "(2,)"),
    ):
        text = message(lambda f=function: loss(model(), BYTES, weighting=f))
        says(text, "(4,)", shape, "one number per time")
    says(message(lambda: loss(model(), BYTES, weighting=lambda s: s * NAN)), "nan", "≥ 0")


@pytest.mark.parametrize(
    "bad",
    [2.0, "likelihood", lambda s: None, lambda s: "a", lambda s: s * math.inf],
    ids=["number", "str", "none", "returns str", "infinite"],
)
def test_weightings_that_are_none(bad: Any) -> None:
    for loss in (score_matching, noise_prediction):
        says(message(lambda loss=loss: loss(model(), BYTES, weighting=bad)), "weighting")


@pytest.mark.parametrize("bad", [Returns(), None, "model", ornstein.cld()])
def test_models_that_are_none(bad: Any) -> None:
    for loss in LOSSES:
        text = message(lambda loss=loss: loss(bad, BYTES))
        says(text, f"model was given as {type(bad).__name__}", "ScoreModel(network, process)")


# ---------------------------------------------------------------- building a model


@pytest.mark.parametrize("bad", ["Channel", "noise", None, 1])
def test_parametrisation(bad: Any) -> None:
    text = message(lambda: model(parametrisation=bad))
    says(text, f"parametrisation={bad!r}", "'channel'", "'joint'")


@pytest.mark.parametrize("bad", ["cld", ornstein.cld, None, 3])
def test_process(bad: Any) -> None:
    text = message(lambda: ScoreModel(Returns(), bad))
    says(text, f"process was given as {type(bad).__name__}", "ornstein.cld()")
    text = message(lambda: model().with_process(bad))
    says(text, f"with_process got {type(bad).__name__}", "ornstein.cld()")


def test_another_process_for_a_joint_model() -> None:
    text = message(lambda: model(parametrisation="joint").with_process(ornstein.vpsde()))
    says(text, "a joint model belongs to its process ('cld')", "parametrisation='channel'")


@pytest.mark.parametrize("bad", ["discrete", Discrete, 256])
def test_likelihood(bad: Any) -> None:
    text = message(lambda: model(likelihood=bad))
    says(text, f"likelihood={bad!r}", "Discrete(levels)", "Tweedie(levels)", "Continuous()")


@pytest.mark.parametrize("kind", [Discrete, Tweedie])
@pytest.mark.parametrize("bad", [1, 0, -3, 2.0, True, "256", NAN])
def test_levels(kind: Any, bad: Any) -> None:
    says(message(lambda: kind(bad)), f"levels={bad!r}", "whole number ≥ 2", "such as 256")


@pytest.mark.parametrize("kind", [Discrete, Tweedie])
@pytest.mark.parametrize("bad", [0, 0.0, 0.5, 1, -0.1, NAN, "a", True])
def test_logit(kind: Any, bad: Any) -> None:
    text = message(lambda: kind(256, bad))
    says(text, f"logit={bad!r}", "None", "between 0 and 0.5", "such as 0.05")


def test_logit_without_levels() -> None:
    text = message(lambda: Tweedie(None, 0.05))
    says(text, "levels=None", "logit=0.05", "Give them", "transform real-valued data yourself")


@pytest.mark.parametrize("bad", [0, -1.0, [1.0, 0.0], torch.tensor([1.0, -2.0])])
def test_data_std(bad: Any) -> None:
    text = message(lambda: model(data_std=bad))
    says(text, "data_std has an entry", "positive", "likelihood.moments(x)")


@pytest.mark.parametrize("name", ["data_mean", "data_std"])
@pytest.mark.parametrize("bad", [NAN, math.inf, [1.0, NAN], "a", None, 1j, [[1.0], [1.0, 2.0]]])
def test_moments_that_are_no_numbers(name: str, bad: Any) -> None:
    says(message(lambda: model(**{name: bad})), name, "numbers")


@pytest.mark.parametrize("bad", ["bin", "", "fourier"])
def test_features(bad: Any) -> None:
    says(message(lambda: model(features=bad)), f"features={bad!r}", "'bins'", "frequencies", "None")


def test_bins_without_pixels() -> None:
    for likelihood in (Continuous(), Tweedie(None)):
        text = message(lambda lik=likelihood: model(likelihood=lik, features="bins"))
        says(text, "features='bins' needs pixels", "Discrete(levels)", "Give frequencies")


@pytest.mark.parametrize("bad", [3.0, [None], [1.0, "a"], [NAN], [math.inf]], ids=repr)
def test_features_that_are_no_frequencies(bad: Any) -> None:
    says(message(lambda: model(features=bad)), "features", "frequencies")
