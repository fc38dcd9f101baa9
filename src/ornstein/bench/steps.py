"""Training steps: ours against a stock one, what is not the network, learned against fixed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ornstein import compiling
from ornstein.bench.counting import Cost, network_cost, optimiser_cost, sample_cost
from ornstein.bench.figures import Check, Line, Part, Table, lines_of, notes_of
from ornstein.bench.racing import Work, captured
from ornstein.bench.sizes import Case, Setting, cost_of, inputs_of, tidy, weights
from ornstein.bench.stock import Stock, StockStep
from ornstein.training.loop import Job
from ornstein.training.loss import Loss
from ornstein.training.updating import Update, usable

OURS = "ornstein, whole step"
LEAST_RATE = 5500  # images per second of the whole step on a GPU, batch 128
LEAST_GAIN = 4.0  # times the stock step, not compiled, TF32
LARGEST_REST = 0.05  # of a step, what is not the network
LARGEST_LEARNED = 1.05  # of the step of a fixed process
LEAST_SMALL = 200  # steps per second of the MNIST net on a GPU
EAGER = "eager, TF32"
FIXED = {1: "vpsde", 2: "cld", 3: "malda"}  # by the number of variables


# ---------------------------------------------------------------- against a stock step


def step(setting: Setting) -> Part:
    """Whole training steps, ours and stock ones, for each batch; then small networks."""
    tables: list[Table] = []
    checks: list[Check] = []
    for number, batch in enumerate(setting.sizes):
        if not setting.out_of_time():
            table, limits = _against_stock(setting, batch)
            tables.append(table)
            checks += limits
            tidy(setting.device)
        if number == 0 and not setting.out_of_time():
            small, limits = _small(setting)
            tables.append(small)
            checks += limits
            tidy(setting.device)
    return Part(tuple(tables), tuple(checks))


def _against_stock(setting: Setting, batch: int) -> tuple[Table, list[Check]]:
    case, device = setting.joint(batch), setting.device
    job = case.job(device)
    network: Any = job.model.network
    works: dict[str, Work] = {OURS: job.step}
    flops = {}
    channels = network.layout.outputs  # of all variables
    x = torch.randn(batch, channels, *case.data.shape[1:], device=device)
    count = 0
    for name, options in _rivals(setting).items():
        rival = Stock(network, channels)
        count = weights(rival)
        title = f"{rival.name}, {name}"
        flops[title] = _stock_flops(rival, batch)
        works[title] = StockStep(rival, x, **options)
    found = setting.race(works, may_fail=list(works)[1:])
    lines = lines_of(found, OURS, batch, {OURS: _step_cost(case, job)}, flops)
    checks = []
    eager = next((name for name in found.times if name.endswith(EAGER)), None)
    if setting.cuda and batch == setting.sizes[0]:
        rate = batch / found.seconds(OURS)
        checks.append(Check(f"images per second, batch {batch}", rate, LEAST_RATE, most=False))
        if eager is not None:
            gain = found.ratio(eager, OURS)
            checks.append(Check(f"{eager} / ours", gain, LEAST_GAIN, most=False))
    table = Table(
        f"training step, {case.name}, K = 2, joint, batch {batch}",
        "× the time of ours",
        lines,
        notes=(f"{weights(network):,} weights; the stock network {count:,}", *notes_of(found)),
    )
    return table, checks


def _rivals(setting: Setting) -> dict[str, dict[str, bool]]:
    """Ways to run a stock step."""
    if not setting.cuda:
        return {"eager": {"narrow": False}}
    return {
        EAGER: {"narrow": False},
        "eager, bfloat16": {"narrow": True},
        "compiled, channels last, bfloat16": {"narrow": True, "compiled": True},
    }


def _stock_flops(rival: Stock, batch: int) -> float:
    return network_cost(rival, rival.inputs, batch, 4).flops


def _step_cost(case: Case, job: Job) -> Cost:
    """The network, the optimiser, and the sample of the kernel."""
    network: Any = job.model.network
    size = case.data.train.x[0].numel()
    return (
        cost_of(network, case.batch, case.narrow)
        + optimiser_cost(weights(network))
        + sample_cost(case.batch, job.model.process.n_vars, size)
    )


def _small(setting: Setting) -> tuple[Table, list[Check]]:
    """The net of MNIST in one process, and the step of the quick start on the CPU."""
    cpu = torch.device("cpu")
    lines, checks = [], []
    cases = [(setting.digits(), cpu)]
    if setting.cuda:
        cases += [(setting.small(narrow=narrow), setting.device) for narrow in (True, False)]
    for case, device in cases:
        job = case.job(device)
        here = Setting(device, setting.quick, tell=setting.tell)
        found = here.race({case.name: job.step})
        network: Any = job.model.network
        flops = cost_of(network, case.batch, case.narrow).flops
        where = f"{case.name}, batch {case.batch}, {device.type}"
        lines.append(Line(where, found.seconds(case.name), None, 1, flops))
        if device.type == "cuda" and case.narrow:
            name = f"steps per second, {case.name}, batch {case.batch}"
            checks.append(Check(name, lines[-1].rate, LEAST_SMALL, most=False))
    return Table("small steps", "", tuple(lines), "steps"), checks


# ---------------------------------------------------------------- what is not the network


def rest(setting: Setting) -> Part:
    """A whole step without the network's forward and backward pass, and its pieces alone."""
    case, device = setting.joint(setting.sizes[0]), setting.device
    job, other = case.job(device), case.job(device)  # pieces would disturb the weights of a run
    whole, net = "whole step", "network, forward and backward"
    data, loss, update = "data", "kernel, noise and loss", "clipping, Adam and running mean"
    works: dict[str, Work] = {
        whole: job.step,
        net: network_alone(other, case),
        data: _data_alone(other, case.batch),
        loss: loss_alone(other, case),
        update: _update_alone(other),
    }
    found = setting.race(works, may_fail=(data, loss, update))
    network: Any = other.model.network
    size, variables = case.data.train.x[0].numel(), other.model.process.n_vars
    costs = {
        net: cost_of(network, case.batch, case.narrow),
        update: optimiser_cost(weights(network)),
    }
    flops = {loss: sample_cost(case.batch, variables, size).flops}
    lines = lines_of(found, whole, case.batch, costs, flops)
    part = 1 - found.ratio(net, whole)
    seconds = part * found.seconds(whole)
    lines = (*lines[:2], Line("the rest: whole step − network", seconds, part), *lines[2:])
    note = "pieces alone, each to its end: in a step they overlap, and some are fused"
    table = Table(
        f"what is not the network, {case.name}, K = 2, joint, batch {case.batch}",
        "of the whole step",
        lines,
        share=True,
        notes=(note, *notes_of(found)),
    )
    check = Check("part of a step outside the network", part, LARGEST_REST)
    return Part((table,), (check,) if setting.cuda else ())


def network_alone(job: Job, case: Case) -> Work:
    """Its forward and backward pass, compiled and captured as a step's are."""
    network: Any = job.model.network
    device = job.device
    x, logsnr = inputs_of(network, device)(case.batch)
    parameters = [p for p in network.parameters() if p.requires_grad]
    network.train()
    compiled = case.experiment.training.compiled_on(device)
    call = compiling.compiled(network, dynamic=False) if compiled else network
    # without its cache of cast weights, which a graph would find gone
    narrow: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "enabled": case.narrow,
        "cache_enabled": False,
    }
    with torch.no_grad(), torch.autocast(device.type, **narrow):
        gradient = torch.randn_like(network(x, logsnr))

    def work() -> object:
        with torch.autocast(device.type, **narrow):
            out = call(x, logsnr)
        return torch.autograd.grad(out, parameters, gradient)

    return captured(work, device)


class Answer(nn.Module):
    """A network that costs nothing: what it says is a parameter."""

    def __init__(self, layout: Any, batch: int) -> None:
        super().__init__()
        self.layout = layout
        variables = () if layout.variables is None else (layout.variables,)
        self.said = nn.Parameter(torch.zeros(batch, *variables, *layout.shape))

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return self.said * 1.0


def loss_alone(job: Job, case: Case) -> Work:
    """Kernel, noise and loss, with their gradients, around a network that costs nothing."""
    options = case.experiment.training
    network: Any = job.model.network
    model: Any = copy.deepcopy(job.model)
    model.network = Answer(network.layout, case.batch).to(job.device)
    loss = Loss(model, options.objective, options.seed, case.narrow)
    loss.settle()
    parameters = [p for p in model.parameters() if p.requires_grad]
    x = job.stream.take(0, case.batch)
    index = torch.arange(case.batch, device=job.device)
    call = compiling.compiled(loss, dynamic=False) if options.compiled_on(job.device) else loss

    def work() -> object:
        return torch.autograd.grad(call(x, index)[0], parameters, allow_unused=True)

    return captured(work, job.device)


def _data_alone(job: Job, batch: int) -> Work:
    """The examples of the next step, put where the last ones were."""
    x, place = job.stream.rows(0, batch), 0

    def work() -> object:
        nonlocal place
        place += batch
        return job.stream.rows(place, batch, out=x)

    return work


def _update_alone(job: Job) -> Work:
    """On gradients that stay as they are."""
    for p in job.model.parameters():
        if p.requires_grad:
            p.grad = torch.randn_like(p)
    state, average, numbers = job.state, job.average, job.state.numbers()
    if usable(state.optimiser):
        update = Update(state.optimiser, average, job.training.optimiser)
        update.point()
        listed = job.runner.listed(numbers)
        return captured(lambda: update.use(listed), job.device)

    def work() -> None:
        state.clip_and_step(numbers)
        average.update(numbers.part)

    return work


# ---------------------------------------------------------------- learned against fixed


def learned(setting: Setting) -> Part:
    """Joint models of K variables, with a fixed process and with a learned one."""
    case, device = setting.large(setting.sizes[0]), setting.device
    # those that have a limit first: time may run out
    wanted = [("fixed", 1), ("fixed", 2), ("learned", 2), ("learned", 3)]
    wanted = wanted[:3] if setting.quick else [*wanted, ("learned", 1), ("fixed", 3)]
    works: dict[str, Work] = {}
    for kind, K in wanted:
        process = FIXED[K] if kind == "fixed" else f"learned-{K - 1}"
        works[f"{kind}, K = {K}"] = case.under(process).job(device).step
    found = setting.race(works)
    first = "fixed, K = 1"
    table = Table(
        f"learned and fixed processes, joint, {case.name}, batch {case.batch}",
        "× the step of a fixed process of one variable",
        lines_of(found, first, case.batch),
        notes=notes_of(found),
    )
    pairs = [("learned, K = 2", "fixed, K = 2"), ("learned, K = 3", first)]
    checks = tuple(
        Check(f"step of {one} / {other}", found.ratio(one, other), LARGEST_LEARNED)
        for one, other in pairs
        if setting.cuda and {one, other} <= set(found.times)
    )
    return Part((table,), checks)
