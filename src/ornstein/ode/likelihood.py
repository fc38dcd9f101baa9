"""The likelihood of the probability flow: log P(x) by an ordinary differential equation.

The flow carries y_ε to y_T and knows what happens to its density (`volume`), so that p_ε(y) of the
model is not bounded but computed. Data is reached from there as in the bound of `objectives`: with
y drawn from q(y_ε | x), in which v₀ is integrated out,

    w(y) = log P(x | y) + log p_ε(y) − log q(y | x),     E w ≤ log E exp(w) = log P(x),

P(x | y) the decoder: levels by exp(−(x̃ − x_k)²/2σ²) for `Discrete`, N(x; x̂, σ²ς²/(σ² + ς²)) for
`Continuous`, and for `Tweedie` the paper's, of dequantised pixels and v₀. With several draws

    log (1/M) Σ_m exp(w_m) = Σ_m p_m w_m − KL(p ‖ 1/M),     p = softmax(w),

rises with M from the bound to log P(x) of the model itself (Burda et al. 2016).

With Hutchinson's trace w is only known up to noise of mean zero. A single draw stays a bound in
expectation. Σ exp(w) would not: exp of noise is more than 1 in the mean, and the figure would come
out too good. But the right side above, with *any* p, is at most the left one. So p is found with
other probes than the w that it weighs: each probe is weighed by what the others say. This is a
bound again, in expectation over the probes, and needs at least two of them.

Errors of the solver are in none of these statements; `rtol` and `atol` keep them small.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ornstein.likelihood import Continuous, Discrete, Likelihood, Tweedie, bits_per_dim
from ornstein.ode.volume import EXACT_UP_TO, Path, Trace, Volume, ends_of, find_path
from ornstein.sampling.flow import Method, check_method
from ornstein.sampling.frames import Frame, Frames
from ornstein.sampling.grids import whole
from ornstein.score import ScoreModel
from ornstein.terms import Job, Random, root_entropy, total, whitening
from ornstein.transition import mix
from ornstein.truncation import Truncation

USUAL, USUAL_EXACT = 1e-4, 1e-5  # tolerances with probes and with the exact trace
CHUNK = 2**22  # numbers times levels at a time


@dataclass(frozen=True)
class OdeBound:
    """A lower bound on log p(x) by the flow, per example: (B,) float64, in nats; prior + flow +
    reconstruction + weighting = nats."""

    nats: Tensor
    prior: Tensor  # log π(y_T) − log N(y_T; r m, C), against Gaussian data of the data's moments
    flow: Tensor  # log p_ε(y) − log q(y | x), but for the prior
    reconstruction: Tensor  # log P(x | y), and the map from data to numbers
    weighting: Tensor  # −KL(p ‖ 1/M): what weighing the draws costs
    dims: int
    name: str  # of the bound
    samples: Tensor  # (B, draws) w of each draw, the mean over probes
    path: Path
    evaluations: int  # looks at the model, for each draw

    @property
    def bits_per_dim(self) -> Tensor:
        """−nats / (dims·log 2): an upper bound on the bits of a coordinate, (B,)."""
        return bits_per_dim(self.nats, self.dims)


def ode_likelihood(
    model: ScoreModel,
    x: Tensor,
    *,
    draws: int = 1,
    trace: Trace = "auto",
    probes: int | None = None,
    method: Method = "dopri5",
    rtol: float | None = None,
    atol: float | None = None,
    likelihood: Likelihood | None = None,
    truncation: Truncation | None = None,
    random: Random = None,
    path: Path | None = None,
) -> OdeBound:
    """The bound on log p(x) of the model's probability flow for a batch x: (B, *shape).

    draws: of y_ε for each example; several are weighed by importance.
    trace: "exact" (a backward pass per coordinate), "hutchinson" (one per probe), or "auto": exact
        for up to 32 coordinates. probes: by default 1, or 2 with several draws, the least that
        keeps it a bound.
    rtol, atol: error allowed in a step, of the whitened state and, with the exact trace, of nats
        per coordinate: by default 1e-5, or 1e-4 with probes, whose noise is larger. The steps are
        chosen on the first 16 examples and then the same for all. path: those of an earlier call,
        so that an example's figure does not depend on its batch.
    """
    flow = Flow(model, draws, trace, probes, method, rtol, atol, likelihood, truncation)
    with torch.no_grad():
        return flow.bound(x, random, path)


@dataclass(frozen=True)
class Flow:
    """What is asked for, checked where it does not depend on the data."""

    model: ScoreModel
    draws: int = 1
    trace: Trace = "auto"
    probes: int | None = None
    method: Method = "dopri5"
    rtol: float | None = None
    atol: float | None = None
    likelihood: Likelihood | None = None
    truncation: Truncation | None = None

    def __post_init__(self) -> None:
        check_method(self.method, *self.tolerances(0))
        if self.trace not in ("auto", "exact", "hutchinson"):
            raise ValueError(
                f"trace={self.trace!r}; expected 'exact', 'hutchinson' or 'auto' (exact for up to "
                f"{EXACT_UP_TO} coordinates)."
            )
        if self.probes is not None:
            whole(self.probes, "probes", 1)
        if torch.is_inference_mode_enabled():
            raise ValueError(
                "the likelihood of a flow was asked for under torch.inference_mode(), where no "
                "derivative can be taken; expected torch.no_grad(), or gradients enabled."
            )

    def exact(self, dims: int) -> bool:
        """Whether the trace is, for data of so many coordinates."""
        return self.trace == "exact" or (self.trace == "auto" and dims <= EXACT_UP_TO)

    def tolerances(self, dims: int) -> tuple[float, float]:
        """rtol and atol, for data of so many coordinates."""
        usual = USUAL_EXACT if self.exact(dims) else USUAL
        rtol = usual if self.rtol is None else self.rtol
        return rtol, rtol if self.atol is None else self.atol

    def counted(self, dims: int) -> int:
        """How many probes there are: none is needed where the trace is exact."""
        if self.exact(dims):
            return 1
        count = (1 if self.draws == 1 else 2) if self.probes is None else self.probes
        if count == 1 and self.draws > 1:
            raise ValueError(
                f"probes=1 with draws={self.draws}: weighing draws by what one probe says of them "
                "would not be a bound; expected probes=2 or more, or trace='exact'."
            )
        return count

    def job(self, x: Tensor, random: Random) -> Job:
        """One call's data and draws, checked."""
        model, truncation = self.model, self.truncation
        return Job(model, x, self.draws, None, "x", self.likelihood, truncation, random)

    def path(self, x: Tensor) -> Path:
        """The steps for such examples, chosen on the first of them."""
        job = self.job(x, None)
        with torch.no_grad():
            values = self.values(job.data[:: self.draws], job)
            return self._path(self.frames(job), values)

    def _path(self, frames: Frames, values: Tensor) -> Path:
        exact, (rtol, atol) = self.exact(frames.dims), self.tolerances(frames.dims)
        return find_path(frames, values, exact, self.method, rtol, atol)

    def frames(self, job: Job) -> Frames:
        """The coordinates of the flow."""
        return Frames(job.model, job.shape, job.start.detach())

    def values(self, data: Tensor, job: Job) -> Tensor:
        """The numbers that diffuse, in the middle of their bins: (B, d) float64."""
        u = torch.full(data.shape, 0.5, dtype=torch.float64, device=data.device)
        u_or_none = u if job.likelihood.dequantised else None
        return job.likelihood.values(data, u_or_none, torch.float64).flatten(1)

    def bound(self, x: Tensor, random: Random, path: Path | None) -> OdeBound:
        """Of a batch, along this path, or one that is chosen on it."""
        job = self.job(x, random)
        frames = self.frames(job)
        count = self.counted(frames.dims)
        if path is None:
            path = self._path(frames, self.values(job.data[:: self.draws], job))
        _check_path(path, frames)
        decoded = _Decoded.of(job, frames)
        size = (job.draws, count, frames.dims)

        def signs(look: int) -> Tensor:
            return job.random.signs(f"ode, probe {look}", size, torch.float64).flatten(0, 1)

        field = Volume(frames, None if self.exact(frames.dims) else signs)
        u, gained = field.along(decoded.u, count, path)
        shape = (job.batch, job.draws)
        return self._weighed(
            _prior(frames, u).reshape(shape),
            decoded.against(u, frames).reshape(shape),
            (gained * job.dims).reshape(*shape, -1),
            decoded.reconstruction.reshape(shape),
            job,
            path,
        )

    def _weighed(
        self,
        prior: Tensor,
        still: Tensor,
        gained: Tensor,
        reconstruction: Tensor,
        job: Job,
        path: Path,
    ) -> OdeBound:
        """All draws together; (B, draws), and `gained` (B, draws, probes)."""
        w = (prior + still + reconstruction).unsqueeze(-1) + gained
        probes = w.shape[-1]
        # each probe is weighed by the mean of the others; a single one (exact) by itself
        others = w if probes == 1 else (w.sum(-1, keepdim=True) - w) / (probes - 1)
        log_p = torch.log_softmax(others, 1)
        p = log_p.exp()

        def mean(part: Tensor) -> Tensor:
            return (p * part).sum(1).mean(-1)

        parts = {
            "prior": mean(prior.unsqueeze(-1)),
            "flow": mean(still.unsqueeze(-1) + gained),
            "reconstruction": mean(reconstruction.unsqueeze(-1)),
            "weighting": -mean(log_p + math.log(job.draws)),
        }
        return OdeBound(
            nats=torch.stack(list(parts.values())).sum(0),
            **parts,
            dims=job.dims,
            name=f"{job.likelihood.name}, flow",
            samples=w.mean(-1),
            path=path,
            evaluations=path.evaluations + self.asks_again(job.likelihood),
        )

    def asks_again(self, likelihood: Likelihood) -> bool:
        """Whether the decoder looks at the model, too."""
        return not isinstance(likelihood, Discrete)

    def timed(self, x: Tensor, path: Path) -> tuple[int, float]:
        """Backward passes of one look, and the seconds that it takes for a batch."""
        job = self.job(x, 0)
        frames = self.frames(job)
        count = self.counted(frames.dims)
        u = _Decoded.of(job, frames).u
        exact, signs = self.exact(frames.dims), u.new_ones(len(u), count, frames.dims)
        field = Volume(frames, None if exact else lambda _: signs)
        flowing = (u, u.new_zeros(len(u), count))
        field.look(frames.first, flowing)  # the first one may compile or choose kernels
        begun = time.perf_counter()
        field.look(frames.first, flowing)[1][1].sum().item()
        passes = frames.dims if exact else count
        return passes, time.perf_counter() - begun


def _prior(frames: Frames, u: Tensor) -> Tensor:
    """log π(y_T) − log N(y_T; r m, C): (B,)."""
    frame = frames.at(frames.last)
    factor = frames.process.prior_factor
    inverse = torch.linalg.solve_triangular(factor, frame.state, upper=False)
    shift = torch.linalg.solve_triangular(factor, frame.kernel.response.unsqueeze(-1), upper=False)
    white = mix(shift, frames.mean[None, None, :], mix(inverse, u))
    less = (frame.volume - factor.diagonal().log().sum()) * frames.dims
    return total((u - white) * (u + white)) / 2 + less


def _check_path(path: Path, frames: Frames) -> None:
    given, own = [path.times[i].log().item() for i in (0, -1)], ends_of(frames)
    if max(abs(a - b) for a, b in zip(given, own, strict=True)) > 1e-9:
        raise ValueError(
            f"the path goes from s = {math.exp(given[0]):.6g} to {math.exp(given[1]):.6g} and this "
            f"flow from {math.exp(own[0]):.6g} to {math.exp(own[1]):.6g}; expected a path of the "
            "same model and truncation."
        )


# ---------------------------------------------------------------- from data to y_ε


@dataclass(frozen=True)
class _Decoded:
    """Draws of y_ε for the data, and what decodes it from them."""

    u: Tensor  # (B, K, d)
    squares: Tensor  # (B,) ‖ε‖², where y = r x + L ε
    reconstruction: Tensor  # (B,)

    @staticmethod
    def of(job: Job, frames: Frames) -> _Decoded:
        frame, K = frames.at(frames.first), frames.process.n_vars
        x = job.likelihood.values(job.data, job.u, torch.float64).flatten(1)
        rows = 2 * K - 1 if isinstance(job.likelihood, Tweedie) else K
        shape = (job.draws, rows, frames.dims)
        drawn = job.random.normal("ode", shape, torch.float64).flatten(0, 1)
        noise = drawn
        if isinstance(job.likelihood, Tweedie):
            known = frames.process.transition(_time(frame, frames), given="state")
            white = whitening(frames.process, frame.kernel, known)
            noise = mix(white, drawn)
        u = frames.drawn(x, noise, frame)
        if isinstance(job.likelihood, Discrete):
            found = _of_levels(job.likelihood, x, noise, frame)
        elif isinstance(job.likelihood, Continuous):
            found = _of_numbers(frames, x, u, frame)
        elif isinstance(job.likelihood, Tweedie):
            found = _of_states(frames, x, noise, drawn, frame)
            found = found + job.likelihood.log_jacobian(job.data, job.u)
        else:
            raise ValueError(f"no reconstruction is known for {job.likelihood!r}")
        return _Decoded(u, total(noise.square()), found)

    def against(self, u: Tensor, frames: Frames) -> Tensor:
        """log N(u_T; 0, 1) − log|M| − log q(y | x), with what has flown to u_T: (B,)."""
        frame = frames.at(frames.first)
        volume = frame.kernel.logdet / 2 - frame.volume
        return (self.squares - total(u.square())) / 2 + volume * frames.dims


def _time(frame: Frame, frames: Frames) -> Tensor:
    """s of the first frame: (1,)."""
    return torch.full_like(frame.volume, math.exp(frames.first))


def _of_levels(likelihood: Discrete, x: Tensor, noise: Tensor, frame: Frame) -> Tensor:
    """log P(k | y), exp(−(x̃ − x_k)²/2σ²) over all levels: (B,)."""
    along = (frame.view.direction.unsqueeze(-1) * noise).sum(1)  # (x̃ − x)/σ
    centres, sigma = likelihood.pixels.centres(x.device), frame.view.sigma
    rest, size = [], max(1, CHUNK // len(centres))
    for part, own in zip(x.flatten().split(size), along.flatten().split(size), strict=True):
        away = (part.unsqueeze(-1) - centres) / sigma  # of (x̃ − x_k)² − (x̃ − x)²
        rest.append(torch.logsumexp(-away * (away / 2 + own.unsqueeze(-1)), -1))
    return -total(torch.cat(rest).reshape(x.shape))


def _of_numbers(frames: Frames, x: Tensor, u: Tensor, frame: Frame) -> Tensor:
    """log N(x; x̂, σ²ς²/(σ² + ς²)), ς of each coordinate: (B,)."""
    std = frames.model.moments.std.expand(frames.shape).flatten()
    sigma = frame.view.sigma
    width = sigma * std / torch.hypot(sigma.expand_as(std), std)
    error = (x - frames.estimate(u, frame)) / width
    return -total(error.square() / 2 + width.log() + math.log(2 * math.pi) / 2)


def _of_states(frames: Frames, x: Tensor, noise: Tensor, drawn: Tensor, frame: Frame) -> Tensor:
    """log p(y₀|y) − log q(y|y₀) − log q(v₀|x) + log q(y|x), the paper's decoder: (B,).

    y = Φy₀ + L_s ε_s, v₀ from ξ, both in `drawn`; log p(y₀|y) is N(y₀; Φ⁻¹(y + Σ_s score), …).
    """
    process, K, d = frames.process, frames.process.n_vars, frames.dims
    s = _time(frame, frames)
    known = process.transition(s, given="state")
    M = torch.linalg.solve_triangular(frame.kernel.cholesky, known.cholesky, upper=False)
    own, aside = drawn[:, :K], drawn[:, K:]
    y = mix(frame.kernel.cholesky, noise, mix(frame.kernel.response.unsqueeze(-1), x.unsqueeze(1)))
    guess = frames.model.noise(y.unflatten(-1, frames.shape), s).flatten(2)
    error = own - mix(M.mT, guess)
    squares = (own - error) * (own + error)
    entropy = root_entropy(process.auxiliary.factor()) - (K - 1) / 2  # −log q(v₀|x) at ξ = 0
    constant = process.log_volume(s) + entropy - frame.kernel.logdet / 2
    constant = constant - K / 2 * math.log(2 * math.pi)
    return (total(squares) + total(aside.square()) - total(noise.square())) / 2 + d * constant
