"""Inception features, for the FID and KID of the literature, through the package torch-fidelity.

The network and its resizing are that package's, so that the figures are those that others report;
the distances are this library's, on the same features. Its weights are fetched by the package, or
given as a file where there is no network. A file is read as tensors and nothing else: what the
package itself unpickles was written here.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ornstein.data import Dataset
from ornstein.files import digest, read_tensors
from ornstein.quality.features import Features

PACKAGE = "torch_fidelity"
LAYER = "2048"  # features before the classes
SOURCE = "weights-inception-2015-12-05-6726825d.pth of the releases of torch-fidelity"


@dataclass(frozen=True, eq=False)
class Inception(Features):
    """Inception-v3 on images with so many levels."""

    network: nn.Module
    levels: int
    weights: str  # where they come from
    name = "inception"
    batch = 32

    @property
    def title(self) -> str:
        return f"Inception-v3 of torch-fidelity, {self.weights}"

    def of(self, x: Tensor) -> Tensor:
        return self.network(coloured(x, self.levels))[0]


def coloured(x: Tensor, levels: int) -> Tensor:
    """Pixels as three channels of 256 levels: (B, 1 or 3, H, W) -> (B, 3, H, W) uint8."""
    if levels != 256:
        x = (x.to(torch.float32) * (255 / (levels - 1))).round()
    return x.to(torch.uint8).expand(-1, 3, -1, -1)


def installed() -> bool:
    """Whether torch-fidelity is there."""
    return importlib.util.find_spec(PACKAGE) is not None


def inception(
    data: Dataset, weights: str | Path | None = None, device: torch.device | str = "cpu"
) -> Inception:
    """For the images of a data set; weights: a .pth or .safetensors file instead of a download."""
    if data.levels is None or len(data.shape) != 3 or data.shape[0] not in (1, 3):
        raise ValueError(
            f"FID was asked for {data.name!r}, examples of shape {data.shape}; expected images "
            "with one or three channels. Leave it out: the other figures are for any data."
        )
    if not installed():
        raise ValueError(
            "FID needs the package torch-fidelity, which is not installed; expected it beside "
            "ornstein: pip install 'ornstein[fidelity]'."
        )
    package = importlib.import_module(PACKAGE)
    if weights is None:
        network, source = _fetched(package), "its own weights"
    else:
        file = Path(weights).expanduser()
        network, source = _with(package, file), f"weights {file.name} ({digest(file)[:8]})"
    return Inception(network.to(torch.device(device)).eval(), data.levels, source)


def _fetched(package: Any) -> nn.Module:
    try:
        return _network(package, None)
    except OSError as error:
        raise ValueError(
            f"the weights of Inception-v3 can't be fetched ({error}); expected a network, or a "
            f"file of them: --weights PATH (weights= in Python), with {SOURCE}."
        ) from error


def _with(package: Any, file: Path) -> nn.Module:
    """From a file; the package gets a copy that holds tensors only."""
    tensors = _tensors(file)
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "weights.pth"
        torch.save(tensors, copy)
        try:
            return _network(package, copy)
        except RuntimeError as error:
            first = str(error).splitlines()[0]
            raise ValueError(
                f"{file} does not fit Inception-v3 ({first}); expected {SOURCE}."
            ) from error


def _network(package: Any, weights: Path | None) -> nn.Module:
    path = None if weights is None else str(weights)
    found: nn.Module = package.FeatureExtractorInceptionV3(
        "inception-v3-compat", [LAYER], feature_extractor_weights_path=path
    )
    return found


def _tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a file of weights."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}; expected weights of Inception-v3: {SOURCE}.")
    if file.suffix == ".safetensors":
        return read_tensors(file)
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch lets through errors of the archive and of what is in it
        first = str(error).strip().splitlines()[:1]
        raise ValueError(
            f"{file} can't be read as tensors ({' '.join(first)}); expected weights of "
            f"Inception-v3: {SOURCE}."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError(f"{file} is no table of tensors; expected {SOURCE}.")
    return found
