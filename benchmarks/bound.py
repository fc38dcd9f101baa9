"""How quiet the bound is, that it does not depend on the process, and that it stays sensible.

    python -m benchmarks.bound --data mnist.npz [--seconds 120] [--device cuda] [--out results.json]

Trains, side by side, one channel model and one joint model per process for a given time on the
pixels `train` of an .npz file (uint8, (N, 28, 28); without --data on drawn strokes), and measures
on `test`, all in one run:

- quiet: the standard deviation over single draws of an example's bound, in bits/dim (root mean
  square over examples). `paper` is the estimator as it is usually written: one time from VPSDE's
  importance density, log π, log q, the integrand with all its terms, and the decoder, all sampled;
  on the same joint model, bound and truncation as `ours, tweedie`.
- invariance: the channel model under many processes, with the difference to VPSDE, paired.
- sensible: ALDA, untrained and trained, with a network in float32 and in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import ornstein
from benchmarks.small_unet import SmallUNet
from ornstein import compiling
from ornstein.likelihood import bits_per_dim
from ornstein.provenance import provenance
from ornstein.terms import joint_error, mix, natural_times, root_entropy, total

PROCESSES = {
    "vpsde": ornstein.vpsde,
    "cld": ornstein.cld,
    "psld": ornstein.psld,
    "alda": ornstein.alda,
    "malda": ornstein.malda,
}
JOINT = ("cld", "malda", "alda")


# ---------------------------------------------------------------- data and models


def strokes(count: int, seed: int) -> np.ndarray:
    """Random polygons drawn with a round pen: (count, 28, 28) uint8."""
    rng = np.random.default_rng(seed)
    grid = np.stack(np.meshgrid(np.arange(28.0), np.arange(28.0), indexing="ij"), -1)
    points = rng.uniform(5, 23, (count, 4, 2))
    ink = np.zeros((count, 28, 28))
    for i in range(3):
        start, way = points[:, i, None, None], (points[:, i + 1] - points[:, i])[:, None, None]
        along = ((grid - start) * way).sum(-1) / (way**2).sum(-1)
        nearest = start + np.clip(along, 0, 1)[..., None] * way
        ink = np.maximum(ink, np.clip(2.2 - np.linalg.norm(grid - nearest, axis=-1), 0, 1))
    return (255 * ink).astype(np.uint8)


def load(path: str | None) -> tuple[Tensor, Tensor]:
    """Pixels to train on and to test on: (N, 1, 28, 28) uint8."""
    if path is None:
        pair = strokes(4096, 0), strokes(512, 1)
    else:
        with np.load(path, allow_pickle=False) as archive:
            pair = archive["train"], archive["test"]
    train, test = (torch.from_numpy(images).unsqueeze(1) for images in pair)
    return train, test


def build(kind: str, name: str, x: Tensor, device: torch.device) -> ornstein.ScoreModel:
    """A model with an untrained network."""
    process = PROCESSES[name]().to(device)
    likelihood = ornstein.Discrete(256)
    mean, std = likelihood.moments(x[:2000])
    K = 1 if kind == "channel" else process.n_vars
    shape = (1, 28, 28) if kind == "channel" else (K, 1, 28, 28)
    torch.manual_seed(0)
    network = SmallUNet(K + 4, shape).to(device)
    return ornstein.ScoreModel(
        network,
        process,
        likelihood,
        kind,
        mean,
        std,
        features="bins",  # type: ignore[arg-type]
    ).to(device)


def train(model: ornstein.ScoreModel, x: Tensor, seconds: float, batch: int) -> dict[str, Any]:
    """Adam on the bound for so many seconds; the network ends as the mean of its last states."""
    device = model.process.device
    x = x.to(device)
    network = model.network
    average = {k: v.detach().clone() for k, v in network.state_dict().items()}
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-3, fused=device.type == "cuda")

    def loss(images: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return ornstein.elbo(model, images).bits_per_dim.mean()

    compiled = compiling.compiled(loss) if device.type == "cuda" else loss
    torch.manual_seed(1)
    first: float | None = None
    start = time.monotonic()
    done, step = 0.0, 0
    while done < 1:
        chosen = torch.randint(len(x), (batch,), device=device)
        rate = 1e-3 * min(1, (step + 1) / 200) * (0.02 + 0.98 * (1 + math.cos(math.pi * done)) / 2)
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        value = compiled(x[chosen])
        value.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimiser.step()
        decay = min(0.999, (step + 1) / (step + 10))
        with torch.no_grad():
            state = network.state_dict()
            torch._foreach_lerp_(list(average.values()), list(state.values()), 1 - decay)
        if first is None:  # the clock starts after compilation
            first, start = value.item(), time.monotonic()
        step += 1
        if step % 10 == 0:
            if not math.isfinite(value.item()):
                raise RuntimeError(f"step {step}: the loss is {value.item()}")
            done = (time.monotonic() - start) / seconds
    network.load_state_dict(average)
    return {"steps": step, "batch": batch, "seconds": seconds}


# ---------------------------------------------------------------- estimators


def paper(model: ornstein.ScoreModel, pixels: Tensor) -> Tensor:
    """One draw of the usual estimator of the tweedie bound, in nats: (B,)."""
    process, K = model.process, model.process.n_vars
    likelihood, B = ornstein.Tweedie(256), len(pixels)
    shape, d = pixels.shape[1:], pixels[0].numel()
    u = torch.rand(pixels.shape, device=pixels.device)
    x = likelihood.values(pixels, u, torch.float32)

    def normal(count: int) -> Tensor:
        return torch.randn((B, count, *shape), device=x.device)

    start = model.truncation.time(process)
    # log π(y_T), y_T ~ q(y_T | x)
    last = process.transition(process.horizon)
    prior = torch.linalg.inv(torch.linalg.cholesky(process.prior_covariance))
    end = mix(prior.expand(B, K, K), last.sample(x, noise=normal(K))[0])
    log_prior = -total(end**2) / 2 + d * (
        torch.linalg.slogdet(prior)[1] - K / 2 * math.log(2 * math.pi)
    )
    # the integrand at one time
    times = ornstein.Importance(ornstein.vpsde().to(x.device), spread="independent")
    place = torch.rand(B, dtype=torch.float64, device=x.device)
    s, weight = times.place(place, ornstein.times.Span(process, start))
    kernel = process.transition(s)
    metric = torch.linalg.solve_triangular(kernel.cholesky, process.noise_factor(s), upper=False)
    eps = normal(K)
    error = joint_error(model, kernel, model.view_of_noise(kernel, s), x, eps)
    trace = torch.diagonal(process.drift(s), dim1=-2, dim2=-1).sum(-1)
    integrand = (total(mix(metric.mT, eps) ** 2) - total(mix(metric.mT, error) ** 2)) / 2
    middle = weight * (integrand + d * trace)
    # log p(y₀ | y_ε) − log q(y_ε | y₀) − log q(v₀ | x)
    kernel = process.transition(start.expand(B))
    known = process.transition(start.expand(B), given="state")
    root = process.auxiliary.factor()
    white = torch.linalg.solve_triangular(
        kernel.cholesky, torch.cat([known.cholesky, kernel.propagator @ root], -1), upper=False
    )
    inner = normal(2 * K - 1)
    eps = mix(white, inner)
    view = model.view_of_noise(kernel, start.expand(B))
    guess = eps - joint_error(model, kernel, view, x, eps)
    found = inner[:, :K] - mix(white[:, :, :K].mT, guess)
    decoded = (total(inner[:, :K] ** 2) - total(found**2)) / 2 + d * process.log_volume(start)
    # H(v₀) sampled: entropy − ½ per coordinate and variable + ½ξ²
    entropy = d * (root_entropy(root) - (K - 1) / 2) + total(inner[:, K:] ** 2) / 2
    return log_prior + middle + decoded + entropy + likelihood.log_jacobian(pixels, u)


def deviation(draw: Any, pixels: Tensor, draws: int) -> dict[str, float]:
    """Mean and standard deviation over single draws per example, bits/dim."""
    dims = pixels[0].numel()
    with torch.no_grad():
        values = torch.stack([bits_per_dim(draw(pixels), dims) for _ in range(draws)])
    error = values.mean(1).std().item() / math.sqrt(draws)
    return {
        "deviation": values.var(0).mean().sqrt().item(),
        "mean": values.mean().item(),
        "error of the mean": error,
    }


def elbo_of(model: ornstein.ScoreModel, **options: Any) -> Any:
    return lambda pixels: ornstein.elbo(model, pixels, **options).nats


def fitted(model: ornstein.ScoreModel, pixels: Tensor, **options: Any) -> ornstein.Adaptive:
    """The proposal that `evaluate` fits."""
    times = ornstein.Adaptive(natural_times(model), bins=32)
    times = times.to(pixels.device).train()
    with torch.no_grad():
        for part in pixels.split(32):
            ornstein.elbo(model, part, draws=8, times=times, **options)
    return times.eval()


# ---------------------------------------------------------------- the three parts


def quiet(models: dict[str, ornstein.ScoreModel], x: Tensor, draws: int) -> dict[str, Any]:
    """Deviations of single draws, and their ratios to the paper's estimator."""
    test, pilot = x[:64], x[64:320]
    tweedie = ornstein.Tweedie(256)
    channel = models["channel"]
    common = {
        "channel, discrete, times of LogSNR": elbo_of(channel, times=ornstein.LogSNR()),
        "channel, discrete": elbo_of(channel),
        "channel, discrete, fitted times": elbo_of(channel, times=fitted(channel, pilot)),
    }
    shared = {name: deviation(draw, test, draws) for name, draw in common.items()}
    record: dict[str, Any] = {}
    for name in JOINT:
        model = models[name]
        ways = {
            "paper": lambda pixels, model=model: paper(model, pixels),
            "ours, tweedie, times of Importance": elbo_of(
                model, likelihood=tweedie, times=ornstein.Importance()
            ),
            "ours, tweedie": elbo_of(model, likelihood=tweedie),
            "ours, tweedie, fitted times": elbo_of(
                model, likelihood=tweedie, times=fitted(model, pilot, likelihood=tweedie)
            ),
            "ours, discrete, times of Importance": elbo_of(model, times=ornstein.Importance()),
            "ours, discrete": elbo_of(model),
            "ours, discrete, fitted times": elbo_of(model, times=fitted(model, pilot)),
        }
        found = {way: deviation(draw, test, draws) for way, draw in ways.items()} | shared
        for way in found:
            found[way] = {
                **found[way],
                "ratio to paper": found[way]["deviation"] / found["paper"]["deviation"],
            }
        record[name] = found
    return record


def random_processes(count: int) -> dict[str, ornstein.Process]:
    """K from 1 to 4, full D, every other one with rates that don't commute."""
    rng = np.random.default_rng(0)
    found: dict[str, ornstein.Process] = {}
    for i in range(count):
        K = 1 + i % 4
        raw, root = rng.standard_normal((K, K)), rng.standard_normal((K, K + 1))
        D = root @ root.T / K
        rates: dict[str, Any] = {}
        if i % 2:
            rates = {"rate_q": ornstein.Constant(5.0), "rate_d": ornstein.Linear(0.1, 20.0)}
        found[f"random {i}, K = {K}"] = ornstein.Diffusion(raw - raw.T, (D + D.T) / 2, **rates)
    return found


def invariance(model: ornstein.ScoreModel, x: Tensor, draws: int) -> dict[str, Any]:
    """The channel model under the presets and 20 random processes."""
    device = model.process.device
    processes = {name: make() for name, make in PROCESSES.items()} | random_processes(20)
    record: dict[str, Any] = {}
    base: ornstein.Evaluation | None = None
    for i, (name, process) in enumerate(processes.items()):
        swapped = model.with_process(process.to(device))
        result = ornstein.evaluate(swapped, x, draws=draws, batch_size=4096, seed=i, quiet=True)
        base = result if base is None else base
        difference, error = result.difference(base)
        record[name] = {
            "bits per dim": result.bits_per_dim,
            "standard error": result.standard_error,
            "draw error": result.draw_error,
            "prior": result.prior,
            "difference to vpsde": difference,
            "error of the difference": error,
        }
    return record


def sensible(
    trained: ornstein.ScoreModel, channel: ornstein.ScoreModel, x: Tensor, draws: int
) -> dict[str, Any]:
    """ALDA, untrained and trained, float32 and bfloat16."""
    untrained = build("joint", "alda", x, trained.process.device)
    alda = channel.with_process(ornstein.alda().to(x.device))
    models = {"joint, untrained": untrained, "joint": trained, "channel": alda}
    record: dict[str, Any] = {}
    for name, model in models.items():
        for kind in (torch.float32, torch.bfloat16):
            model.network.to(kind)
            for likelihood in (ornstein.Discrete(256), ornstein.Tweedie(256)):
                result = ornstein.evaluate(
                    model, x, draws=draws, batch_size=2048, likelihood=likelihood, quiet=True
                )
                key = f"{name}, {str(kind).split('.')[1]}, {likelihood.name}"
                record[key] = {
                    "bits per dim": result.bits_per_dim,
                    "standard error": result.standard_error,
                }
            model.network.to(torch.float32)
    return record


# ---------------------------------------------------------------- the run


def train_all(args: argparse.Namespace, folder: Path) -> None:
    """Every model in a process of its own, side by side on a GPU."""
    jobs = [("channel", "vpsde"), *(("joint", name) for name in JOINT)]
    running = []
    for kind, name in jobs:
        command = [sys.executable, "-m", "benchmarks.bound", "--train", kind, name, str(folder)]
        command += ["--seconds", str(args.seconds), "--device", args.device]
        command += ["--batch", str(args.batch)] + (["--data", args.data] if args.data else [])
        running.append(subprocess.Popen(command))
        if args.device == "cpu":
            running[-1].wait()
    if any(process.wait() for process in running):
        raise SystemExit("a training run failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--draws", type=int, default=64)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--train", nargs=3)
    args = parser.parse_args()
    device = torch.device(args.device)
    pixels, test = load(args.data)
    if args.train:
        kind, name, folder = args.train
        model = build(kind, name, pixels, device)
        note = train(model, pixels, args.seconds, args.batch)
        key = "channel" if kind == "channel" else name
        save_file(model.network.state_dict(), Path(folder) / f"{key}.safetensors")
        (Path(folder) / f"{key}.json").write_text(json.dumps(note))
        return
    with tempfile.TemporaryDirectory() as scratch:
        train_all(args, Path(scratch))
        models, notes = {}, {}
        for key in ("channel", *JOINT):
            kind = "channel" if key == "channel" else "joint"
            model = build(kind, "vpsde" if key == "channel" else key, pixels, device)
            model.network.load_state_dict(load_file(Path(scratch) / f"{key}.safetensors"))
            models[key] = model.eval()
            notes[key] = json.loads((Path(scratch) / f"{key}.json").read_text())
    test = test.to(device)
    record = {
        "data": "drawn strokes" if args.data is None else Path(args.data).stem,
        "training": notes,
        "parameters": sum(p.numel() for p in models["channel"].network.parameters()),
        "quiet": quiet(models, test, args.draws),
        "invariance": invariance(models["channel"], test[: args.examples], 8),
        "sensible": sensible(models["alda"], models["channel"], test[: args.examples], 8),
        "provenance": provenance(),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
