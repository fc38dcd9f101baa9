"""Sample quality: distances in closed form, a classifier that can be trusted, figures that rank."""

from __future__ import annotations

import json
import math
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor, nn

from ornstein import ScoreModel, vpsde
from ornstein.data import Dataset, Split, load
from ornstein.likelihood import Continuous
from ornstein.networks import MLP
from ornstein.quality import (
    Classifier,
    Inception,
    Raw,
    Scale,
    cached_as,
    classifier,
    cost,
    distances,
    fidelity,
    frechet,
    frechet_with_error,
    inception,
    kernel_distance,
    measure,
    precision_recall,
    sliced_wasserstein,
    sliced_wasserstein_with_error,
    usual_features,
)
from ornstein.quality.fidelity import coloured
from ornstein.sampling import Ancestral
from tests.test_errors import message, says

CPU = torch.device("cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_moments(mean: Tensor, covariance: Tensor, n: int = 200, seed: int = 0) -> Tensor:
    """Vectors whose sample mean and covariance are exactly these: (n, F)."""
    x = normal(n, len(mean), seed=seed)
    x = x - x.mean(0)
    white = x @ torch.linalg.inv(torch.linalg.cholesky(x.T @ x / (n - 1)).T)
    return mean + white @ torch.linalg.cholesky(covariance).T


def covariance(F: int, seed: int) -> Tensor:
    """With eigenvalues over three orders of magnitude, in directions of their own."""
    turn = torch.linalg.qr(normal(F, F, seed=seed))[0]
    return turn @ torch.diag(torch.logspace(-2, 1, F, dtype=torch.float64)) @ turn.T


# ---------------------------------------------------------------- Fréchet


def test_frechet_of_diagonal_gaussians() -> None:
    a, b = torch.tensor([1.0, 4.0, 9.0]).double(), torch.tensor([4.0, 1.0, 0.25]).double()
    mean = torch.tensor([0.5, -1.0, 2.0]).double()
    one = with_moments(torch.zeros(3).double(), a.diag())
    other = with_moments(mean, b.diag(), n=300, seed=1)
    truth = mean.square().sum() + (a.sqrt() - b.sqrt()).square().sum()
    assert frechet(one, other) == pytest.approx(truth.item(), rel=1e-12)


@pytest.mark.parametrize("F", [2, 5, 17])
def test_frechet_of_gaussians_that_do_not_commute(F: int) -> None:
    A, B = covariance(F, 1), covariance(F, 2)
    assert (A @ B - B @ A).abs().max() > 0.1
    root = scipy.linalg.sqrtm(A.numpy() @ B.numpy()).real
    truth = 1.0 + float(np.trace(A.numpy() + B.numpy() - 2 * root))
    shift = torch.full((F,), F**-0.5, dtype=torch.float64)
    one, other = with_moments(shift, A), with_moments(torch.zeros(F).double(), B, 150, 3)
    assert frechet(one, other) == pytest.approx(truth, rel=1e-9)  # sqrtm's own digits
    assert frechet(other, one) == pytest.approx(frechet(one, other), rel=1e-12)


@pytest.mark.parametrize(("n", "F"), [(50, 7), (10, 40), (2, 3)])
def test_frechet_of_a_set_with_itself_is_zero(n: int, F: int) -> None:
    """To the square of rounding, since it is a sum of squares of differences."""
    x = 100 * normal(n, F)
    assert 0 <= frechet(x, x) < 1e-20
    assert frechet(x, x.flip(0)) < 1e-20


def test_frechet_with_fewer_vectors_than_numbers() -> None:
    """Two lines at an angle: C₁ = u uᵀ, C₂ = v vᵀ, so the distance is 2 − 2|u·v|."""
    u, v = torch.zeros(6).double(), torch.zeros(6).double()
    u[0], v[0], v[3] = 1.0, math.cos(1.0), math.sin(1.0)
    side = torch.tensor([-1.0, 1.0]).double().unsqueeze(1) / math.sqrt(2)
    assert frechet(side * u, side * v) == pytest.approx(2 - 2 * math.cos(1.0), rel=1e-12)


def test_frechet_does_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = normal(100, 5), 2 * normal(70, 5, seed=1)
    truth = frechet(a, b), kernel_distance(a, b), precision_recall(a, b), sliced_wasserstein(a, b)
    monkeypatch.setattr(distances, "_CHUNK", 130)
    found = frechet(a, b), kernel_distance(a, b), precision_recall(a, b), sliced_wasserstein(a, b)
    assert found[2] == truth[2]
    assert [found[0], *found[1], found[3]] == pytest.approx([truth[0], *truth[1], truth[3]], 1e-12)


# ---------------------------------------------------------------- kernel distance


def test_kernel_distance_by_hand() -> None:
    """k(u, v) = (uv + 1)³ on the line: a = 0, 1, 2 and b = 1, 2, −1."""
    a, b = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[1.0], [2.0], [-1.0]])
    aa = (1 + 1 + 27) / 3  # pairs 01, 02, 12
    bb = (27 + 0 - 1) / 3  # pairs 12, 1−1, 2−1
    ab = (3 + 8 + 27 + 0 + 27 + 125 - 1) / 9
    value, error = kernel_distance(a, b)
    assert value == pytest.approx(aa + bb - 2 * ab, rel=1e-14)
    without = [_plain(a[[1, 2]], b), _plain(a[[0, 2]], b), _plain(a[[0, 1]], b)]
    others = [_plain(a, b[[1, 2]]), _plain(a, b[[0, 2]]), _plain(a, b[[0, 1]])]
    square = 2 * np.var(without) + 2 * np.var(others)  # (n − 1)/n Σ(·)² of both
    assert error == pytest.approx(math.sqrt(square), rel=1e-12)


def _plain(a: Tensor, b: Tensor) -> float:
    """The definition, pair by pair."""
    n, m, F = len(a), len(b), a.shape[1]

    def k(u: Tensor, v: Tensor) -> float:
        return (float(u @ v) / F + 1) ** 3

    aa = sum(k(a[i], a[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    bb = sum(k(b[i], b[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return aa + bb - 2 * sum(k(u, v) for u in a for v in b) / (n * m)


def test_kernel_distance_is_the_definition() -> None:
    a, b = normal(9, 4), normal(6, 4, seed=1) + 0.5
    assert kernel_distance(a, b)[0] == pytest.approx(_plain(a, b), rel=1e-12)


def test_kernel_distance_is_unbiased_and_knows_its_error() -> None:
    """E k(u, v) over Gaussians N(m, 1) and N(0, 1) on the line: the moments up to the third."""
    shift, repeats, n = 0.7, 400, 40
    m1, m2, m3 = shift, shift**2 + 1, shift**3 + 3 * shift
    aa = 1 + 3 * m1**2 + 3 * m2**2 + m3**2  # (uv + 1)³ = 1 + 3uv + 3u²v² + u³v³
    bb, ab = 1 + 3, 1 + 3 * m2
    for moved, truth in ((shift, aa + bb - 2 * ab), (0.0, 0.0)):
        found, errors = [], []
        for i in range(repeats):
            value, error = kernel_distance(
                normal(n, 1, seed=2 * i) + moved, normal(n, 1, seed=2 * i + 1)
            )
            found.append(value)
            errors.append(error**2)
        spread = float(np.std(found))
        assert abs(np.mean(found) - truth) < 4 * spread / math.sqrt(repeats)
        # at least the truth, at most twice its square (Efron–Stein); a tenth for the estimate
        assert 0.9 < math.sqrt(np.mean(errors)) / spread < 1.1 * math.sqrt(2)


# ---------------------------------------------------------------- precision and recall


def test_precision_and_recall_of_modes() -> None:
    """Clusters far apart: samples in 2 of 4 and one of their own."""
    centres = 100 * torch.eye(5).double()
    real = torch.cat([centres[i] + normal(50, 5, seed=i) for i in range(4)])
    fake = torch.cat([real[:100].flip(0) + 1e-9, centres[4] + normal(25, 5, seed=9)])
    precision, recall = precision_recall(real, fake)
    assert precision == 100 / 125
    assert recall == 100 / 200
    assert precision_recall(real, real + 1e4) == (0.0, 0.0)
    assert precision_recall(real, real) == (1.0, 1.0)


def test_reach_is_the_distance_to_the_kth_neighbour() -> None:
    """Points 0, 1, 3, 7: with k = 1 they reach 1, 1, 2, 4; with k = 2 they reach 3, 2, 3, 6."""
    real = torch.tensor([[0.0], [1.0], [3.0], [7.0]])
    fake = torch.tensor([[-1.0], [-1.1], [5.0], [11.0], [11.1], [13.0], [13.1]])
    one = [True, False, True, True, False, False, False]
    two = [True, True, True, True, True, True, False]
    assert precision_recall(real, fake, k=1)[0] == sum(one) / 7
    assert precision_recall(real, fake, k=2)[0] == sum(two) / 7


def test_samples_that_are_all_alike() -> None:
    real, one = normal(30, 3), torch.zeros(30, 3).double()
    assert precision_recall(real, one) == (1.0, 0.0)  # in the middle of the data, and nothing else
    same = torch.zeros(10, 3)
    assert precision_recall(same, same[:5]) == (1.0, 1.0)  # a reach of zero reaches its like


# ---------------------------------------------------------------- sliced Wasserstein


@pytest.mark.parametrize("sizes", [(50, 50), (50, 30), (7, 100), (1, 9), (12, 18)])
def test_on_the_line_it_is_the_transport(sizes: tuple[int, int]) -> None:
    """W₂² by linear programming, whose solution needs no order."""
    a, b = normal(sizes[0], 1), 3 * normal(sizes[1], 1, seed=1) + 1
    costs = (a - b.T).square().flatten().numpy()
    n, m = sizes
    rows = np.kron(np.eye(n), np.ones(m))
    columns = np.kron(np.ones(n), np.eye(m))
    right = np.concatenate([np.full(n, 1 / n), np.full(m, 1 / m)])
    best = scipy.optimize.linprog(costs, A_eq=np.vstack([rows, columns]), b_eq=right)
    assert sliced_wasserstein(a, b, directions=3) == pytest.approx(math.sqrt(best.fun), rel=1e-9)


def test_equal_sets_of_unequal_size() -> None:
    """Each point twice is the same law."""
    x = normal(20, 4)
    assert sliced_wasserstein(x, x.repeat(2, 1), 16) == pytest.approx(0, abs=1e-12)
    assert sliced_wasserstein(x, x.repeat(3, 1)[torch.randperm(60)], 16) < 1e-12


def test_shift_and_scale() -> None:
    """A shift by δ is at |θ·δ| in each direction, root mean square ‖δ‖/√d; in one direction
    Gaussians are √((m₁ − m₂)² + (σ₁ − σ₂)²) apart."""
    x, shift = normal(64, 5), torch.tensor([3.0, 0, 0, -4.0, 0]).double()
    found = sliced_wasserstein(x, x + shift, 4096)
    # (θ·δ)²/‖δ‖² is Beta(½, 2): mean 1/5, variance 2·4/(25·7)
    relative = math.sqrt(8 / 175) * 5 / 2 / math.sqrt(4096)
    assert found == pytest.approx(5 / math.sqrt(5), rel=4 * relative)
    grid = torch.from_numpy(scipy.stats.norm.ppf((np.arange(20_000) + 0.5) / 20_000))
    one, other = grid.unsqueeze(1), 1.5 * grid.unsqueeze(1) + 2
    assert sliced_wasserstein(one, other) == pytest.approx(math.sqrt(4.25), rel=1e-4)  # the tails


def test_directions_are_a_function_of_the_seed() -> None:
    a, b = normal(30, 6), normal(40, 6, seed=1)
    before = torch.get_rng_state()
    assert sliced_wasserstein(a, b, 8, seed=3) == sliced_wasserstein(a, b, 8, seed=3)
    assert sliced_wasserstein(a, b, 8, seed=3) != sliced_wasserstein(a, b, 8, seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    # the first direction of many is the only one of one
    squares = [sliced_wasserstein(a, b, k, 3) ** 2 * k for k in (1, 2, 3)]
    assert squares[0] < squares[1] < squares[2]


# ---------------------------------------------------------------- errors


def few_directions(samples: Tensor, real: Tensor) -> tuple[float, float]:
    return sliced_wasserstein_with_error(samples, real, 16)


@pytest.mark.parametrize("figure", [frechet_with_error, few_directions])
@pytest.mark.parametrize("shift", [0.0, 0.5])
def test_errors_are_those_of_repetitions(
    figure: Callable[..., tuple[float, float]], shift: float
) -> None:
    """Over 100 sets of samples; a spread of 100 is known to 7 %, and the jackknife is no less."""
    real, found = normal(2000, 4, seed=999), []
    for i in range(100):
        found.append(figure(1.1 * normal(200, 4, seed=i) + shift, real))
    values, errors = (np.array(column) for column in zip(*found, strict=True))
    assert 0.85 < math.sqrt((errors**2).mean()) / values.std() < 1.5


def test_values_beside_errors_are_the_same() -> None:
    a, b = normal(50, 4), normal(60, 4, seed=1) + 1
    assert frechet_with_error(a, b)[0] == frechet(a, b)
    assert sliced_wasserstein_with_error(a, b)[0] == sliced_wasserstein(a, b)
    errors = [sliced_wasserstein_with_error(a, b, k)[1] for k in (64, 512)]
    assert errors[0] == errors[1]  # the first directions do
    assert math.isnan(frechet_with_error(a[:3], b)[1])  # too few for two groups


def test_bad_sets() -> None:
    good, nan = normal(5, 3), normal(5, 3)
    nan[2, 1] = math.nan
    for figure in (frechet, kernel_distance, precision_recall, sliced_wasserstein):
        says(message(lambda f=figure: f(good, nan)), "NaN")
        says(message(lambda f=figure: f(good, good[:, :2])), "3", "2", "same features")
        says(message(lambda f=figure: f(good, good[0])), "shape (3,)", "(N, F)", "flatten")
        says(message(lambda f=figure: f(good[:0], good)), "0 vectors", "at least")
    says(message(lambda: frechet(good[:1], good)), "1 vector;", "at least 2")
    says(message(lambda: precision_recall(good[:3], good)), "3 vectors", "at least 4")
    says(message(lambda: precision_recall(good, good, k=0)), "k=0")
    says(message(lambda: sliced_wasserstein(good, good, 0)), "directions=0")
    says(message(lambda: frechet([1.0], good)), "list", "(N, F)")  # type: ignore[arg-type]


# ---------------------------------------------------------------- the classifier


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return load("digits")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def trained(digits: Dataset, cache: Path) -> Classifier:
    return classifier(digits, folder=cache)


def weights(found: Classifier) -> dict[str, Tensor]:
    return dict(found.network.state_dict())


def same(one: Classifier, other: Classifier) -> bool:
    pairs = zip(weights(one).values(), weights(other).values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_classifier_of_digits(digits: Dataset, trained: Classifier) -> None:
    assert trained.accuracy is not None and trained.accuracy > 0.95
    with torch.no_grad():
        scores = trained.network(trained.scale(digits.test.x))
    right = (scores.argmax(1) == digits.test.labels).double().mean().item()
    assert trained.accuracy == right
    assert f"10 classes, {right:.1%} right" in trained.title
    found = trained.all(digits.train.x, CPU).double()
    torch.testing.assert_close(found.mean(0), torch.zeros(64).double(), atol=1e-5, rtol=0)
    assert found.var(0, correction=0).mean().item() == pytest.approx(1, rel=1e-5)


def test_classifier_is_a_function_of_the_seed() -> None:
    data = load("moons")
    state = torch.get_rng_state()
    one, two, other = (classifier(data, seed, steps=20) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert same(one, two)
    assert not same(one, other)
    assert (classifier(data).accuracy or 0) > 0.99  # the moons don't touch


def test_classifier_is_trained_once(
    digits: Dataset, trained: Classifier, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it is trained again")

    monkeypatch.setattr(sys.modules["ornstein.quality.classifier"], "_train", refuse)
    assert [file.name for file in cache.iterdir()] == [cached_as(digits, 0)]
    again = classifier(digits, folder=cache)
    assert same(again, trained)
    assert again.accuracy == trained.accuracy
    x = digits.test.x[:20]
    assert torch.equal(again.all(x, CPU), trained.all(x, CPU))
    for other in (1, 2):  # another seed is another file
        with pytest.raises(AssertionError, match="trained again"):
            classifier(digits, other, folder=cache)


@pytest.mark.parametrize("harm", ["cut", "bit", "other", "empty"])
def test_damaged_file_is_trained_again(harm: str, tmp_path: Path) -> None:
    data = load("moons")
    good = classifier(data, steps=5, folder=tmp_path)
    file = tmp_path / cached_as(data, 0, 5)
    content = bytearray(file.read_bytes())
    if harm == "bit":
        content[-7] ^= 1
    elif harm == "other":
        classifier(load("rings"), steps=5, folder=tmp_path)
        content = bytearray((tmp_path / cached_as(load("rings"), 0, 5)).read_bytes())
    file.write_bytes({"cut": content[: len(content) // 2], "empty": b""}.get(harm, content))
    with pytest.warns(UserWarning, match="trained again"):
        again = classifier(data, steps=5, folder=tmp_path)
    assert same(again, good)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(classifier(data, steps=5, folder=tmp_path), good)


def test_folder_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="not kept"):
        classifier(load("moons"), steps=2, folder=tmp_path / "file" / "inside")


def test_labels_are_part_of_the_name(digits: Dataset) -> None:
    labels = digits.train.labels
    assert labels is not None
    other = Dataset(
        "other",
        Split(digits.train.x, labels % 2),
        digits.valid,
        Split(digits.test.x, None),
        digits.levels,
        "",
    )
    assert cached_as(other, 0) != cached_as(digits, 0)
    found = classifier(other, steps=2)
    assert found.classes == 2 and found.accuracy is None  # no labels to test on


def test_labels_of_any_numbers() -> None:
    """Classes 7 and −3, and one in the test split that training never saw."""
    moons = load("moons")
    train, test = moons.train.labels, moons.test.labels
    assert train is not None and test is not None
    seen = torch.where(test == 0, 7, -3)
    seen[:500] = 99
    odd = Dataset(
        "odd",
        Split(moons.train.x, torch.where(train == 0, 7, -3)),
        moons.valid,
        Split(moons.test.x, seen),
        None,
        "",
    )
    assert classifier(odd).accuracy == pytest.approx(0.75, abs=0.01)


def test_data_without_labels(digits: Dataset) -> None:
    swiss = load("swissroll")
    says(message(lambda: classifier(swiss)), "no labels", "features='raw'")
    one = Split(digits.train.x, torch.zeros(len(digits.train), dtype=torch.int64))
    single = Dataset("single", one, digits.valid, digits.test, 17, "")
    says(message(lambda: classifier(single)), "two classes")
    says(message(lambda: classifier(digits, steps=0)), "steps=0")
    assert usual_features(digits) == "classifier"
    assert usual_features(swiss) == "raw"
    assert usual_features(single) == "none"


# ---------------------------------------------------------------- measure


def noised(x: Tensor, scale: float) -> Tensor:
    moved = x + scale * normal(*x.shape, seed=5)
    return moved.round().clamp(0, 16).to(torch.uint8)


def test_figures_rank(digits: Dataset, trained: Classifier) -> None:
    """Real data, a little noise, much noise, nothing but noise."""
    real = digits.valid.x
    noise = (17 * torch.rand(150, 1, 8, 8)).to(torch.uint8)
    sets = [real, noised(real, 1.0), noised(real, 4.0), noise]
    found = [measure(x, digits, trained).figures for x in sets]
    for name in ("sliced_wasserstein", "frechet", "kernel_distance"):
        values = [getattr(each, name) for each in found]
        assert values == sorted(values), (name, values)
        assert values[-1] > 5 * abs(values[0])
    precision = [each.precision or 0.0 for each in found]
    assert precision[0] > precision[2] > precision[3]  # the first two within an error of 0.025
    assert (found[0].recall or 0) > 0.9 > 0.2 > (found[-1].recall or 0)


def test_floor_is_what_new_data_comes_to(digits: Dataset, trained: Classifier) -> None:
    found = measure(digits.test.x, digits, trained)
    floor = found.floor
    assert floor is not None and found.floor_samples == found.samples == 300
    for name in ("sliced_wasserstein", "frechet", "kernel_distance", "precision", "recall"):
        mine, other = getattr(found.figures, name), getattr(floor, name)
        assert mine == pytest.approx(other, rel=1e-9)  # the same examples in another order
    few = measure(digits.test.x[:100], digits, trained)
    assert few.floor is not None and few.floor_samples == few.matched == 100
    assert (few.floor.frechet or 0) > 1.5 * (floor.frechet or 0)  # the bias is about 1/n
    many = measure(digits.train.x, digits, trained)
    assert (many.samples, many.floor_samples, many.matched) == (1347, 300, 1347)
    assert (many.figures.frechet or 1) < 1e-9  # repeating the reference is far below the floor
    assert many.figures.precision == many.figures.recall == 1


def test_measure_is_made_of_its_figures(digits: Dataset, trained: Classifier) -> None:
    """Against all of the reference, in the order of any file."""
    x = noised(digits.test.x[:60], 2.0)
    found = measure(x, digits, trained, split="test", directions=32, seed=4, neighbours=5)
    real, scale = digits.test.x, Scale.of(digits)
    flat, sliced = scale(real).flatten(1), scale(x).flatten(1)
    assert float(flat.min()) == -1 and float(flat.max()) == 1
    truth = sliced_wasserstein(sliced, flat, 32, seed=4)
    assert found.figures.sliced_wasserstein == pytest.approx(truth, rel=1e-12)
    truth = frechet(trained.all(x, CPU), trained.all(real, CPU))
    assert found.figures.frechet == pytest.approx(truth, rel=1e-9)
    assert (found.split, found.floor_split, found.real) == ("test", "valid", 300)
    raw = measure(x, digits, "raw", split="test")
    assert raw.figures.frechet == pytest.approx(frechet(sliced, flat), rel=1e-9)
    assert isinstance(Raw(scale).of(x), Tensor)


def test_vectors_are_measured_in_their_spread() -> None:
    data = load("moons")
    big = Dataset(
        "big",
        *(Split(s.x * torch.tensor([1e3, 1.0]) + 50) for s in (data.train, data.valid, data.test)),
        None,
        "",
    )
    found = measure(big.valid.x, big, directions=32)
    truth = measure(data.valid.x, data, "raw", directions=32)
    assert found.features == "raw"
    assert found.figures.frechet == pytest.approx(truth.figures.frechet, rel=1e-2)  # float32
    assert found.figures.sliced_wasserstein == pytest.approx(
        truth.figures.sliced_wasserstein, rel=1e-3
    )


def test_images_without_labels(digits: Dataset) -> None:
    bare = Dataset(
        "bare",
        *(Split(split.x) for split in (digits.train, digits.valid, digits.test)),
        digits.levels,
        "",
    )
    found = measure(digits.valid.x, bare)
    assert found.features == "none" and found.figures.frechet is None
    assert found.figures.precision is None
    assert "Fréchet" not in found.line and "sliced Wasserstein" in found.line


def test_line_and_file(digits: Dataset, trained: Classifier, tmp_path: Path) -> None:
    found = measure(noised(digits.test.x, 3.0), digits, trained)
    line = str(found)
    for word in ("Fréchet distance", "± ", "(data: ", "precision 0.", "300 samples against 1347"):
        assert word in line, line
    assert "digits train" in line and "right on test" in line and "300 of test" in line
    found.save(tmp_path / "deep" / "q.json", which="best")
    record = json.loads((tmp_path / "deep" / "q.json").read_text(encoding="utf-8"))
    assert record["figures"]["frechet"] == found.figures.frechet
    assert record["floor"]["recall"] == (found.floor and found.floor.recall)
    assert record["accuracy"] == trained.accuracy
    assert record["which"] == "best" and "torch" in record["provenance"]


def test_bad_samples(digits: Dataset, trained: Classifier) -> None:
    x = digits.test.x

    def told(samples: Any, **options: Any) -> str:
        return message(lambda: measure(samples, digits, trained, **options))

    says(told(x[:, :, :4]), "(300, 1, 4, 8)", "(n, 1, 8, 8)")
    says(told(x.float()), "float32", "restore")
    says(told(x + 1), "from 1 to 17", "0 … 16")
    says(told(x.numpy()), "ndarray", "tensor")
    says(told(x[:0]), "(0, 1, 8, 8)")
    says(told(x[:3]), "3 samples", "too few", "more than 3")
    says(told(x, split="all"), "split='all'", "train, valid or test")
    says(message(lambda: measure(x, digits, "pixels")), "features='pixels'")  # type: ignore[arg-type]
    moons = load("moons")
    bad = moons.test.x.clone()
    bad[3, 0] = math.inf
    says(message(lambda: measure(bad, moons, "raw")), "infinite")


def test_no_held_out_data(digits: Dataset, trained: Classifier) -> None:
    alone = Dataset("alone", digits.train, digits.valid[:0], digits.test[:0], 17, "")
    found = measure(digits.test.x, alone, trained)
    assert found.floor is None and found.floor_samples == 0 and "(data" not in found.line
    says(message(lambda: measure(digits.test.x, alone, trained, split="test")), "no test split")


# ---------------------------------------------------------------- cost


def test_cost_counts_evaluations() -> None:
    """The time is that of a network which waits: 30 calls of 5 ms, and what torch adds."""

    class Slow(MLP):
        calls = 0

        def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
            import time

            time.sleep(0.005)
            Slow.calls += 1
            return super().forward(x, logsnr)

    model = ScoreModel(Slow((2,), None, 0, 8, 1, 0.0), vpsde(), Continuous())
    found = cost(model, 60, Ancestral(steps=9), batch_size=20)
    assert (found.samples, found.evaluations) == (60, 10)
    assert Slow.calls == 4  # one sample, then one batch, each in a single step
    assert found.seconds is not None
    assert 30 * 0.005 <= found.seconds < 30 * 0.05


# ---------------------------------------------------------------- Inception


class Stub(nn.Module):
    """Stands in for the package's network: three means of the channels, and how it was built."""

    def __init__(self, name: str, features: list[str], feature_extractor_weights_path: Any) -> None:
        super().__init__()
        assert (name, features) == ("inception-v3-compat", ["2048"])
        if feature_extractor_weights_path is None:
            raise OSError("no network")
        self.gain = nn.Parameter(torch.ones(3))
        state = torch.load(feature_extractor_weights_path, weights_only=True)
        self.load_state_dict(state)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        assert x.dtype == torch.uint8 and x.shape[1] == 3
        return (self.gain * x.to(torch.float32).mean((2, 3)),)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("torch_fidelity")
    package.FeatureExtractorInceptionV3 = Stub  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch_fidelity", package)
    monkeypatch.setattr(fidelity, "installed", lambda: True)


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("kind", ["pth", "safetensors"])
def test_inception_from_a_file(kind: str, digits: Dataset, tmp_path: Path) -> None:
    from ornstein.files import write_tensors

    file, gain = tmp_path / f"w.{kind}", {"gain": torch.tensor([1.0, 2.0, 3.0])}
    if kind == "pth":
        torch.save(gain, file)
    else:
        write_tensors(file, gain)
    features = inception(digits, file)
    assert isinstance(features, Inception) and "w." in features.title
    x = digits.test.x[:7]
    truth = (x.double() * 255 / 16).round().mean((1, 2, 3)).unsqueeze(1) * torch.arange(1, 4)
    torch.testing.assert_close(features.all(x, CPU).double(), truth, rtol=1e-6, atol=1e-4)
    found = measure(digits.test.x, digits, features)
    assert found.features == "inception" and found.figures.frechet is not None


@pytest.mark.usefixtures("stub")
def test_inception_with_mistakes(digits: Dataset, tmp_path: Path) -> None:
    says(message(lambda: inception(digits)), "can't be fetched", "no network", "weights")
    says(message(lambda: inception(digits, tmp_path / "no.pth")), "no.pth")
    (tmp_path / "text.pth").write_text("hello")
    says(message(lambda: inception(digits, tmp_path / "text.pth")), "can't be read")
    torch.save({"other": torch.ones(2)}, tmp_path / "other.pth")
    says(message(lambda: inception(digits, tmp_path / "other.pth")), "does not fit")
    torch.save([torch.ones(2)], tmp_path / "list.pth")
    says(message(lambda: inception(digits, tmp_path / "list.pth")), "no table of tensors")
    torch.save({"a": Ran()}, tmp_path / "code.pth")
    says(message(lambda: inception(digits, tmp_path / "code.pth")), "can't be read")
    assert not Ran.ran
    says(message(lambda: inception(load("moons"))), "images")


class Ran:
    """What an untrusted file could hold."""

    ran = False

    def __reduce__(self) -> Any:
        return setattr, (Ran, "ran", True)


def test_without_the_package(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fidelity, "installed", lambda: False)
    says(message(lambda: inception(digits)), "pip install 'ornstein[fidelity]'")


def test_colours() -> None:
    grey = torch.tensor([0, 8, 16], dtype=torch.uint8).reshape(1, 1, 1, 3)
    assert coloured(grey, 17).tolist() == [[[[0, 128, 255]]] * 3]
    rgb = torch.arange(12, dtype=torch.uint8).reshape(1, 3, 2, 2)
    assert torch.equal(coloured(rgb, 256), rgb)


@pytest.mark.slow
def test_fid_and_kid_are_those_of_torch_fidelity(digits: Dataset, tmp_path: Path) -> None:
    """The real package with random weights: its figures from the same images are ours."""
    package = pytest.importorskip("torch_fidelity")
    real, fake = digits.test.x[:40], noised(digits.valid.x[:40], 3.0)
    kind = package.FeatureExtractorInceptionV3
    blank = kind.__new__(kind)
    file = tmp_path / "random.pth"
    load_state, state = nn.Module.load_state_dict, {}
    torch.save({}, file)
    try:  # built once with nothing loaded, to get weights of the right shapes

        def taking(module: nn.Module, given: Any, *more: Any, **options: Any) -> None:
            state.update(module.state_dict())

        nn.Module.load_state_dict = taking  # type: ignore[assignment, method-assign]
        kind.__init__(blank, "inception-v3-compat", ["2048"], str(file))
    finally:
        nn.Module.load_state_dict = load_state  # type: ignore[method-assign]
    # He's scale, so that something comes out at the end
    scaled = {k: v * math.sqrt(6) if k.endswith("conv.weight") else v for k, v in state.items()}
    torch.save(scaled, file)

    class Images(torch.utils.data.Dataset[Tensor]):
        def __init__(self, x: Tensor) -> None:
            self.x = coloured(x, 17)

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, i: int) -> Tensor:
            return self.x[i]

    truth = package.calculate_metrics(
        input1=Images(fake),
        input2=Images(real),
        cuda=False,
        fid=True,
        kid=True,
        kid_subsets=1,
        kid_subset_size=40,
        feature_extractor_weights_path=str(file),
        cache=False,
        verbose=False,
    )
    features = inception(digits, file)
    one, other = features.all(fake, CPU), features.all(real, CPU)
    fid, kid = truth["frechet_inception_distance"], truth["kernel_inception_distance_mean"]
    assert fid > 0.1 and abs(kid) > 1e-3  # there is something to compare
    # there 2,009 eigenvalues that are zero come out at about 1e-16 and are added as square roots
    assert frechet(one, other) == pytest.approx(fid, rel=1e-3)
    assert kernel_distance(one, other)[0] == pytest.approx(kid, rel=1e-3)  # float32 there
