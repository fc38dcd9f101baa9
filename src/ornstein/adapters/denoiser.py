"""A model of `diffusers` as the network of a channel model.

Such a model was trained on numbers x′ = c x: pixels k are k/127.5 − 1 there and (2k + 1)/256 − 1
here, so c = 256/255. Noise is scaled alike, hence log SNR is λ′ = λ − 2 log c there. With
ᾱ = sigmoid(λ′), a = √ᾱ and s = √(1 − ᾱ)

    z = a c x̃ = a x′ + s ε,     v̂ from the model (`frames`),     ε̂ = a v̂ + s z.

The Gaussian answer of a `ScoreModel` for data N(0, 1/c²) is just s z, its network is given z, and
the output is multiplied by a. So it is v̂ that such a model asks for, whatever the model from
elsewhere predicts. That is answers="velocity", the way of `from_diffusers`: z stays of size one,
where x̃ overflows half types, and x̂ = (a z − s v̂)/c has no cancellation at any noise.
answers="noise" is for models without preconditioning: x̃ to ε̂.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ornstein.adapters.frames import Steps, amplitudes, frame_of
from ornstein.answers import over
from ornstein.parts import Record, part

Answers = Literal["noise", "velocity"]
Given = Mapping[str, "Tensor | Mapping[str, Tensor]"]
BYTES = 256 / 255  # from our pixels of 256 levels to theirs


def library() -> Any:
    """The package `diffusers`, which is an extra."""
    try:
        return importlib.import_module("diffusers")
    except ImportError as error:
        raise ImportError(
            "this needs the package diffusers, which is not installed; expected it beside "
            "ornstein. Install it with pip install 'ornstein[diffusers]'."
        ) from error


@part("diffusers")
class Diffusers(nn.Module):
    """x̃ and log SNR to noise (or z to velocity) by a model and the scheduler of its training."""

    def __init__(
        self,
        model: nn.Module,
        scheduler: Any,
        *,
        scale: float = BYTES,
        steps: Steps = "fractional",
        answers: Answers = "noise",
        conditioning: Given | None = None,
    ) -> None:
        """
        scheduler: says which steps and which prediction the model was trained with; it is not used
            to sample.
        scale: from the numbers of the likelihood to those of the model: levels/(levels − 1) for
            pixels, 1 for real-valued data and latents.
        steps: "fractional" asks between two steps where log SNR falls between them, "nearest"
            rounds, for models whose steps are a table of embeddings.
        answers: "noise" for ScoreModel(…, precondition=False), "velocity" for a ScoreModel with
            data_mean=0 and data_std=1/scale.
        conditioning: further arguments of the model by name, one for all examples: tensors
            with a first axis of 1, or none, or dicts of such.
        """
        super().__init__()
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"the model was given as {type(model).__name__}; expected a module of diffusers "
                "such as UNet2DModel. To load one from a folder use "
                "ornstein.adapters.from_diffusers."
            )
        if not (isinstance(scale, (int, float)) and math.isfinite(scale) and scale > 0):
            raise ValueError(
                f"scale={scale!r}; expected a positive number: levels/(levels − 1) for pixels, "
                "1 for real-valued data."
            )
        if answers not in ("noise", "velocity"):
            raise ValueError(f"answers={answers!r}; expected 'noise' or 'velocity'.")
        self.frame = frame_of(scheduler, steps)
        if steps == "fractional" and _setting(model, "time_embedding_type") == "learned":
            raise ValueError(
                f"the {type(model).__name__} has an embedding for each of its steps and none "
                "between; expected steps='nearest' for it."
            )
        self.model, self.scheduler = model, scheduler
        self.scale, self.steps, self.answers = float(scale), steps, answers
        self.conditioning = Conditioning(conditioning or {})
        self._plain = _call_options(model)

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        """x̃ to ε̂, or z to v̂: like x, at least float32."""
        theirs = logsnr.to(torch.float64) - 2 * math.log(self.scale)  # (B,)
        a, s = amplitudes(theirs)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        z = wide if self.answers == "velocity" else over(a * self.scale, wide) * wide
        ask = self.frame.question(theirs)
        output = self._ask(over(ask.scale, z) * z, ask.time)
        velocity = over(ask.output, z) * output.to(z.dtype) + over(ask.input, z) * z
        if self.answers == "velocity":
            return velocity
        return over(a, z) * velocity + over(s, z) * z

    def _ask(self, z: Tensor, time: Tensor) -> Tensor:
        """The model's own answer, without the variances that some models add: like z."""
        kind = self._dtype(z)
        if time.is_floating_point():
            time = time.to(torch.float32)  # never half: a step would be blurred with others
        try:
            output = self.model(
                z.to(kind), timestep=time, **self.conditioning.expanded(len(z), kind), **self._plain
            )
        except RuntimeError as error:
            if "indices" in str(error) and time.is_floating_point():
                raise ValueError(
                    f"the {type(self.model).__name__} takes whole steps only ({error}); expected "
                    "steps='nearest' for it."
                ) from error
            raise
        output = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
        if not isinstance(output, Tensor) or output.shape[:1] != z.shape[:1]:
            raise ValueError(
                f"the {type(self.model).__name__} returned {type(output).__name__}; expected a "
                "tensor like its input, a tuple that begins with one, or an output with a sample."
            )
        if output.dim() == z.dim() and output.shape[1] == 2 * z.shape[1]:
            output = output[:, : z.shape[1]]  # the rest are learned variances
        return output

    def _dtype(self, z: Tensor) -> torch.dtype:
        kinds = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return next(kinds, z.dtype)

    # ---------------------------------------------------------------- to a file and back

    def describe(self) -> Record:
        """Classes, configurations and options, as JSON can hold them."""
        found = library()
        for thing, what in ((self.model, "model"), (self.scheduler, "scheduler")):
            name = type(thing).__name__
            if getattr(found, name, None) is not type(thing):
                raise ValueError(
                    f"the {what} is a {name}, which diffusers does not have; expected one of its "
                    "own classes, so that it can be built again without any other code."
                )
        return {
            "library": "diffusers",
            "class": type(self.model).__name__,
            "config": _config(self.model),
            "dtype": str(self._dtype(torch.empty(()))).removeprefix("torch."),
            "scheduler_class": type(self.scheduler).__name__,
            "scheduler": _config(self.scheduler),
            "scale": self.scale,
            "steps": self.steps,
            "answers": self.answers,
            "conditioning": self.conditioning.describe(),
        }

    @classmethod
    def rebuild(cls, fields: Record) -> Diffusers:
        """From a description, with fresh weights: the true ones come with a state dict."""
        expected = {"library", "class", "config", "dtype", "scheduler_class", "scheduler"}
        expected |= {"scale", "steps", "answers", "conditioning"}
        if set(fields) != expected or fields["library"] != "diffusers":
            raise ValueError(
                f"a denoiser is described by {', '.join(sorted(fields))}; expected library="
                f"'diffusers' and {', '.join(sorted(expected - {'library'}))}."
            )
        model = from_config(fields["class"], fields["config"], "ModelMixin")
        kind = _as_dtype(fields["dtype"])
        if any(p.dtype != kind for p in model.parameters()):  # diffusers warns of casts
            model = model.to(kind)
        return cls(
            model,
            from_config(fields["scheduler_class"], fields["scheduler"], "SchedulerMixin"),
            scale=fields["scale"],
            steps=fields["steps"],
            answers=fields["answers"],
            conditioning=_empty(fields["conditioning"]),
        )

    def extra_repr(self) -> str:
        return f"scale={self.scale:g}, steps={self.steps!r}, answers={self.answers!r}"


class Conditioning(nn.Module):
    """Arguments that are the same for all examples, kept with the model's tensors."""

    def __init__(self, given: Given) -> None:
        super().__init__()
        for name, value in given.items():
            if hasattr(self, name) or not name.isidentifier():
                raise ValueError(f"conditioning has {name!r}; expected a name of an argument.")
            if isinstance(value, Mapping):
                self.add_module(name, Conditioning(value))
            elif isinstance(value, Tensor) and (value.dim() == 0 or len(value) == 1):
                self.register_buffer(name, value.detach().clone())
            else:
                shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                raise ValueError(
                    f"conditioning has {name!r}, a {type(value).__name__}{shape}; expected a "
                    "tensor with a first axis of 1, the same for all examples. Take value[:1], or "
                    "one model for each condition."
                )

    def expanded(self, size: int, dtype: torch.dtype) -> dict[str, Any]:
        """For a batch of this size: real numbers in the model's type."""
        found: dict[str, Any] = {}
        for name, value in self.named_buffers(recurse=False):
            numbers = value.to(dtype) if value.is_floating_point() else value
            found[name] = numbers.expand(size, *value.shape[1:])
        for name, inner in self.named_children():
            if isinstance(inner, Conditioning):
                found[name] = inner.expanded(size, dtype)
        return found

    def describe(self) -> Record:
        """Shapes and types; the numbers are in the state dict."""
        found: Record = {
            name: {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
            for name, value in self.named_buffers(recurse=False)
        }
        for name, inner in self.named_children():
            if isinstance(inner, Conditioning):
                found[name] = {"inside": inner.describe()}
        return found


def from_config(name: Any, config: Any, base: str) -> Any:
    """A model or scheduler of `diffusers` by its name; never code from anywhere else."""
    found = class_of(name, base)
    if not isinstance(config, dict):  # a string would be fetched from the net
        raise ValueError(
            f"the configuration of {name} is {type(config).__name__}; expected an object."
        )
    return found.from_config({k: v for k, v in config.items() if not k.startswith("_")})


def class_of(name: Any, base: str) -> Any:
    """A class that `diffusers` exports, of this kind."""
    package = library()
    found = getattr(package, name, None) if isinstance(name, str) else None
    kinds = (getattr(package, base), package.ConfigMixin)
    if not (isinstance(found, type) and all(issubclass(found, kind) for kind in kinds)):
        what = "models" if base == "ModelMixin" else "schedulers"
        raise ValueError(
            f"diffusers {package.__version__} has no {name!r} among its {what}; expected the name "
            "of one, such as UNet2DModel or DDPMScheduler. A newer diffusers may have it."
        )
    return found


def _config(thing: Any) -> Record:
    """A configuration as JSON has it, without what is private to its file."""
    return {k: v for k, v in json.loads(thing.to_json_string()).items() if not k.startswith("_")}


def _setting(model: nn.Module, name: str) -> Any:
    config = getattr(model, "config", None)
    return config.get(name) if isinstance(config, Mapping) else None


def _call_options(model: nn.Module) -> dict[str, Any]:
    """What to say in each call, from the model's own signature."""
    arguments = inspect.signature(model.forward).parameters
    loose = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in arguments.values())
    if "timestep" not in arguments and not loose:
        raise ValueError(
            f"{type(model).__name__} takes {', '.join(arguments) or 'nothing'}; expected a "
            "denoiser that takes a sample and a timestep."
        )
    return {"return_dict": False} if "return_dict" in arguments else {}


def _empty(described: Record) -> dict[str, Any]:
    """Zeros to be loaded into."""
    return {
        name: _empty(value["inside"])
        if "inside" in value
        else torch.zeros(value["shape"], dtype=_as_dtype(value["dtype"]))
        for name, value in described.items()
    }


def _as_dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the type {name!r} is unknown; expected one of torch, such as float32.")
    return found
