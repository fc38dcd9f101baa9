"""A score model from `diffusers` objects, from a folder that it has saved, or from a name on a hub.

Only safetensors are read, and only classes of `diffusers` itself are built.

Where to truncate: a denoiser that was trained on pixels as if they were real numbers does not see
single levels. Where the noise is smaller than a bin it wins nothing, and loses half a nat for each
unit of log SNR, while the decoder of `Discrete` would know the level without it. The two balance
near 0.4 of a bin. If the first step has σ = 0.01, as DDPM's does, the bound is 0.45 to 0.55 bits
per dimension tighter there than at a sixth of a bin.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from ornstein.adapters.denoiser import Diffusers, Given, class_of, library
from ornstein.adapters.frames import Steps
from ornstein.likelihood import Discrete, Likelihood, OfPixels
from ornstein.process import Process
from ornstein.processes import vpsde
from ornstein.score import ScoreModel
from ornstein.truncation import NoiseLevel, Truncation

DENOISERS = ("unet", "transformer")  # what pipelines call them
PART_OF_AN_UNSEEN_BIN = 0.4


def from_diffusers(
    model: nn.Module | str | Path | Any,
    scheduler: Any = None,
    process: Process | None = None,
    *,
    likelihood: Likelihood | None = None,
    truncation: Truncation | None = None,
    scale: float | None = None,
    steps: Steps = "fractional",
    conditioning: Given | None = None,
) -> ScoreModel:
    """A channel model under any process whose denoiser comes from `diffusers`.

    model: a U-Net or transformer; or a pipeline; or the folder or hub name of either.
    scheduler: the one of its training; left out for pipelines, which have one.
    process: VPSDE if not given; model.with_process(other) changes it.
    likelihood: Discrete(256) if not given, Continuous() for latents.
    truncation: 0.4 of a bin for Discrete, if not given: see above.
    scale, steps, conditioning: as in `Diffusers`; scale follows from the likelihood.
    """
    likelihood = Discrete() if likelihood is None else likelihood
    if scale is None:
        scale = scale_of(likelihood)
    if truncation is None and isinstance(likelihood, Discrete):
        truncation = NoiseLevel(likelihood.pixels.finest() * PART_OF_AN_UNSEEN_BIN)
    if isinstance(model, (str, Path)):
        model, scheduler = _loaded(str(model), scheduler)
    elif not isinstance(model, nn.Module):
        model, scheduler = _parts(model, scheduler)
    if scheduler is None:
        raise ValueError(
            f"no scheduler was given for the {type(model).__name__}; expected the one that it was "
            "trained with, such as diffusers.DDPMScheduler(prediction_type='epsilon')."
        )
    network = Diffusers(
        model, scheduler, scale=scale, steps=steps, answers="velocity", conditioning=conditioning
    )
    return ScoreModel(
        network,
        vpsde() if process is None else process,
        likelihood,
        data_mean=0.0,
        data_std=1 / network.scale,
        truncation=truncation,
    )


def scale_of(likelihood: Likelihood) -> float:
    """From the numbers of a likelihood to pixels from −1 to 1, ends included, or to themselves."""
    if not isinstance(likelihood, Likelihood):
        raise ValueError(
            f"likelihood={likelihood!r}; expected ornstein.Discrete(levels), "
            "ornstein.Tweedie(levels) or ornstein.Continuous()."
        )
    if likelihood.density or not isinstance(likelihood, OfPixels):
        return 1.0
    pixels = likelihood.pixels
    if pixels.logit is not None:
        raise ValueError(
            f"likelihood={likelihood!r} has a logit map, and models of diffusers know pixels from "
            "−1 to 1; expected logit=None. Give scale= if yours was trained on such numbers."
        )
    return pixels.levels / (pixels.levels - 1)


def _parts(pipeline: Any, scheduler: Any) -> tuple[Any, Any]:
    """Denoiser and scheduler of a pipeline."""
    found = [getattr(pipeline, name, None) for name in DENOISERS]
    model = next((part for part in found if isinstance(part, nn.Module)), None)
    if model is None:
        raise ValueError(
            f"the model was given as {type(pipeline).__name__}; expected a U-Net or transformer of "
            "diffusers, a pipeline that has one, or a folder or name to load them from."
        )
    return model, getattr(pipeline, "scheduler", None) if scheduler is None else scheduler


def _loaded(place: str, scheduler: Any) -> tuple[Any, Any]:
    """Denoiser and scheduler of a folder or hub name: of a pipeline, or of a model alone."""
    package = library()
    try:
        index = package.DiffusionPipeline.load_config(place)
    except OSError:  # not a pipeline
        return _read(place, _class_name(place), "ModelMixin"), scheduler
    entries = {name: index.get(name) for name in (*DENOISERS, "scheduler")}
    present = [name for name in DENOISERS if _entry(entries[name])]
    if not present:
        raise ValueError(
            f"{place} has neither {' nor '.join(DENOISERS)}; expected a pipeline of diffusers with "
            "one of them, or the folder of a model."
        )
    model = _read(place, _entry(entries[present[0]]), "ModelMixin", subfolder=present[0])
    if scheduler is None:
        kind = _entry(entries["scheduler"])
        scheduler = _read(place, kind, "SchedulerMixin", subfolder="scheduler")
    return model, scheduler


def _entry(entry: Any) -> str | None:
    """The class of a pipeline's part, if that comes from diffusers."""
    whole = isinstance(entry, (list, tuple)) and len(entry) == 2
    return entry[1] if whole and entry[0] == "diffusers" else None


def _class_name(place: str) -> Any:
    try:
        return library().UNet2DModel.load_config(place).get("_class_name")
    except OSError as error:
        raise ValueError(
            f"{place!r} can't be read ({error}); expected a folder or hub name with a pipeline "
            "(model_index.json) or a model (config.json) of diffusers."
        ) from error


def _read(place: str, name: Any, base: str, **options: Any) -> Any:
    """One part, from safetensors."""
    kind = class_of(name, base)
    if base == "ModelMixin":
        options["use_safetensors"] = True
    try:
        return kind.from_pretrained(place, **options)
    except OSError as error:
        raise ValueError(
            f"the {name} of {place!r} can't be loaded ({error}); expected its weights as "
            "safetensors. Save it with diffusers' save_pretrained, which writes them."
        ) from error
