"""A small classifier of a data set's labels, for its features: the layer before the classes.

Nothing is downloaded: it is trained here, in seconds, on the training split. The same data, seed
and number of steps give the same classifier, so that it can be kept in a file and used again. Its
features are shifted, and divided by one number, so that over the training examples they have mean 0
and variances of mean 1. Samples that are all alike and in the middle are then at a Fréchet distance
of F, the number of features.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from ornstein.data import Dataset, Split, Stream
from ornstein.files import read_tensors, write_tensors
from ornstein.quality.features import Features, Scale, Watch
from ornstein.sampling.grids import whole

FORMAT = 1  # of the file; a change of the network or of its training is another
EXAMPLES = 128  # in each step of training
PASSES, LEAST, MOST = 3, 250, 1000  # over the data, but not fewer nor more steps than this
RATE, DECAY, WARM = 2e-3, 0.01, 50
WIDTH = 32  # channels of the first convolution
SIZE = 64  # features
GRID = 4  # pixels to a side that the last convolution leaves, at most
LARGE = 24  # images of this side on are halved by the first convolution already
MOST_CLASSES = 1000


class Network(nn.Module):
    """Data as numbers of order 1 to features, and those to classes."""

    mean: Tensor
    scale: Tensor
    accuracy: Tensor

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.body = convolutions(shape) if len(shape) == 3 else layers(math.prod(shape))
        self.head = nn.Linear(SIZE, classes)
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("accuracy", torch.full((), math.nan, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes."""
        return self.head(self.body(x))

    def features(self, x: Tensor) -> Tensor:
        """With mean 0 and variances of mean 1."""
        return (self.body(x) - self.mean) / self.scale


def convolutions(shape: tuple[int, ...]) -> nn.Sequential:
    """For images: halved until they are small, then flattened."""
    channels, height, width = shape
    side = max(height, width)
    parts: list[nn.Module] = []
    inside, outside, stride = channels, WIDTH, 2 if side >= LARGE else 1
    while True:
        parts += [nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(4, outside), nn.ReLU()]
        height, width = ((n + stride - 1) // stride for n in (height, width))
        if max(height, width) <= GRID:
            break
        inside, outside, stride = outside, min(2 * outside, 4 * WIDTH), 2
    flat = outside * height * width
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(flat, SIZE), nn.SiLU())


def layers(size: int) -> nn.Sequential:
    """For vectors."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(size, 2 * SIZE),
        nn.ReLU(),
        nn.Linear(2 * SIZE, 2 * SIZE),
        nn.ReLU(),
        nn.Linear(2 * SIZE, SIZE),
        nn.SiLU(),  # with a ReLU some features would be zero for all data
    )


@dataclass(frozen=True, eq=False)
class Classifier(Features):
    """Features of a classifier that knows the labels of a data set."""

    network: Network
    scale: Scale
    classes: int
    name = "classifier"

    @property
    def accuracy(self) -> float | None:
        found = self.network.accuracy.item()
        return None if math.isnan(found) else found

    @property
    def title(self) -> str:
        right = "" if self.accuracy is None else f", {self.accuracy:.1%} right on test"
        return f"a classifier of {self.classes} classes{right}"

    def of(self, x: Tensor) -> Tensor:
        return self.network.features(self.scale(x))


def labelled(data: Dataset) -> bool:
    """Whether there is something for a classifier to tell apart."""
    labels = data.train.labels
    return labels is not None and bool((labels != labels[:1]).any())


def classifier(
    data: Dataset,
    seed: int = 0,
    *,
    steps: int | None = None,
    folder: str | Path | None = None,
    device: torch.device | str = "cpu",
    watch: Watch | None = None,
) -> Classifier:
    """Trained on the training split; taken from the folder where it was trained before.

    The file's name says which data, labels, seed and steps it is for. One that is damaged is
    trained again, with a warning. By default there are three passes over the data, and between 250
    and 1000 steps.
    """
    steps = usual_steps(data) if steps is None else steps
    whole(steps, "steps", 1)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed={seed!r}; expected a whole number.")
    known = classes_of(data)
    where = torch.device(device)
    scale = Scale.of(data)
    file = None if folder is None else Path(folder).expanduser() / cached_as(data, seed, steps)
    if file is not None and file.exists():
        try:
            found = Classifier(_read(file, data, len(known)), scale, len(known))
            found.network.to(where)
            return found
        except ValueError as error:
            warnings.warn(f"{error} It is trained again.", stacklevel=2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Network(data.shape, len(known)).to(where)
    found = Classifier(network, scale, len(known))
    _train(found, data, known, seed, steps, where, watch)
    if file is not None:
        tensors = network.state_dict()
        try:
            write_tensors(file, {**tensors, "sum": _sum(tensors)})
        except OSError as error:
            warnings.warn(f"the classifier is not kept: {error}", stacklevel=2)
    return found


def usual_steps(data: Dataset) -> int:
    """How long training is, unless somebody says otherwise."""
    return min(MOST, max(LEAST, PASSES * len(data.train) // EXAMPLES))


def cached_as(data: Dataset, seed: int, steps: int | None = None) -> str:
    """The name of the file that a classifier is kept in."""
    steps = usual_steps(data) if steps is None else steps
    labels = hashlib.sha256()
    for split in (data.train, data.test):
        if split.labels is not None:
            labels.update(split.labels.cpu().numpy().tobytes())
    about = f"{data.fingerprint}-{labels.hexdigest()[:8]}"
    return f"classifier-{FORMAT}-{about}-seed{seed}-steps{steps}.safetensors"


def classes_of(data: Dataset) -> Tensor:
    """The labels that occur: (classes,), sorted; raises where there is nothing to tell apart."""
    if not labelled(data) or data.train.labels is None:
        raise ValueError(
            f"{data.name!r} has no labels to train a classifier on; expected at least two classes. "
            "Use features='raw', or only the sliced Wasserstein distance (features='none')."
        )
    known = data.train.labels.unique()
    if len(known) > MOST_CLASSES:
        raise ValueError(
            f"{data.name!r} has {len(known)} different labels; expected at most {MOST_CLASSES} "
            "classes. Use features='raw' or 'none'."
        )
    return known


def _train(
    found: Classifier,
    data: Dataset,
    known: Tensor,
    seed: int,
    steps: int,
    where: torch.device,
    watch: Watch | None,
) -> None:
    """AdamW with a warm-up and a rate that falls to zero, on the order of a stream."""
    network, split = found.network, data.train
    target = _numbered(split, known)
    order = Stream(torch.arange(len(split)), seed)
    optimiser = torch.optim.AdamW(network.parameters(), RATE, weight_decay=DECAY)

    def rate(step: int) -> float:
        rise = min(1.0, (step + 1) / WARM)
        return rise * (1 + math.cos(math.pi * step / steps)) / 2

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    with torch.enable_grad():
        for step in range(steps):
            rows = order.take(step * EXAMPLES, EXAMPLES)
            scores = network(found.scale(split.x[rows].to(where)))
            loss = functional.cross_entropy(scores, target[rows].to(where))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            if watch is not None:
                watch(step + 1, steps)
    network.requires_grad_(False)
    raw = found.all(split.x[order.take(0, min(len(split), 10_000))], where).to(torch.float64)
    network.mean.copy_(raw.mean(0))
    spread = raw.var(0, correction=0).mean().sqrt()
    network.scale.copy_(torch.where(spread > 0, spread, 1.0))
    held = data.test if len(data.test) and data.test.labels is not None else None
    if held is not None:
        network.accuracy.copy_(_accuracy(found, held, known, where))


def _numbered(split: Split, known: Tensor) -> Tensor:
    """Labels as 0 … classes − 1, and −1 for those that training never saw: (N,)."""
    labels = split.labels
    if labels is None:
        raise ValueError("the split has no labels; expected one for each example.")
    place = torch.searchsorted(known, labels).clamp(max=len(known) - 1)
    return torch.where(known[place] == labels, place, -1)


def _accuracy(found: Classifier, held: Split, known: Tensor, where: torch.device) -> Tensor:
    right, target = 0, _numbered(held, known)
    with torch.no_grad():
        for x, labels in zip(held.x.split(found.batch), target.split(found.batch), strict=True):
            scores = found.network(found.scale(x.to(where)))
            right += int((scores.argmax(1).cpu() == labels).sum())
    return torch.tensor(right / len(held), dtype=torch.float64)


def _read(file: Path, data: Dataset, classes: int) -> Network:
    """A classifier from its file, on the CPU."""
    tensors = read_tensors(file)
    kept = tensors.pop("sum", None)
    network = Network(data.shape, classes)
    wanted = {name: (value.shape, value.dtype) for name, value in network.state_dict().items()}
    if {name: (value.shape, value.dtype) for name, value in tensors.items()} != wanted:
        raise ValueError(f"{file} holds another network; expected a classifier of this data.")
    if kept is None or not torch.equal(kept, _sum(tensors)):
        raise ValueError(f"{file} is damaged; expected numbers of the checksum in it.")
    network.load_state_dict(tensors)
    network.requires_grad_(False)
    return network


def _sum(tensors: dict[str, Tensor]) -> Tensor:
    """SHA-256 of all numbers: (32,) uint8."""
    found = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        found.update(name.encode())
        found.update(value.detach().cpu().numpy().tobytes())
    return torch.frombuffer(bytearray(found.digest()), dtype=torch.uint8)
