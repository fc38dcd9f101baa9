"""The work of a training step on its device: examples in, gradients used, a row of figures out.

    gather → [ mirror → loss → backward → norms, clip, Adam, running mean → row ]

What is in brackets becomes one CUDA graph on a GPU, where the step is compiled: the host gathers
the examples, writes five numbers (learning rates, powers, the mean's weight) and launches it,
without ever waiting. The first steps are done one operation at a time, in which everything is
compiled and set up; they count like all others. The very first is compared with the same step as
it is written: compilers make mistakes. What can't be captured goes on as it began, with a warning.
A process that is learned is captured again when its panels have changed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ornstein import compiling
from ornstein.data import Stream
from ornstein.ledger import processes
from ornstein.process import Process
from ornstein.training.average import Average
from ornstein.training.distribution import agreed, share, unsynchronised, wrapped
from ornstein.training.loss import VALUES, Loss
from ornstein.training.options import Training
from ornstein.training.state import State
from ornstein.training.updating import Numbers, Update, usable

WARM = 3  # steps before a capture
CLOSE = 0.05  # of a loss and its parts, by which bfloat16 and dropout may change it
LOOK = 100  # steps between two looks at a learned process


class Runner:
    """One step after another; `step` returns VALUES and the norms of both groups' gradients."""

    def __init__(
        self, loss: Loss, state: State, average: Average, stream: Stream, training: Training
    ) -> None:
        self.loss, self.state, self.average = loss, state, average
        self.stream, self.training = stream, training
        self.rank, self.world = processes()
        self.micro = share(training.batch, training.accumulate)
        self.device = loss.model.process.device
        self.compiled = training.compiled_on(self.device)
        self.call = self._prepared()
        self.update: Update | None = None
        self.graph: Graph | None = None
        self._warm = 0
        self._told = False  # that a clock was slowed down
        adaptive = training.objective.times == "adaptive"  # learns on the host, of each call
        self._trusted = not self.compiled or adaptive or self.world > 1
        self._capture = self.compiled and self.device.type == "cuda" and not adaptive
        self._capture = self._capture and self.world == 1

    @property
    def captured(self) -> bool:
        """Whether the step is one graph by now."""
        return self.graph is not None

    def step(self) -> Tensor:
        """The next step of the optimiser: (8,) float64, nothing of it read from the device."""
        if self.device.type != "cuda":
            return self._step()
        with torch.cuda.device(self.device):  # where kernels are launched and graphs captured
            return self._step()

    def _step(self) -> Tensor:
        if self.update is None and self.compiled and usable(self.state.optimiser):
            self.update = Update(self.state.optimiser, self.average, self.training.optimiser)
            self.state.by_kernels = True
        self._look_at_process()
        if self._warm == 0 and self.graph is None:
            self.loss.settle()  # here, since a checkpoint may have been loaded meanwhile
        if self._capture and self.graph is None and self._warm >= WARM:
            self._try_to_capture()
        if self.graph is not None:
            return self.graph.replay(self)
        try:
            with self._aside():
                found = self._plain()
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._warm or not self.compiled:
                raise
            self._go_on_without(f"can't be compiled ({compiling.first_line(error)})")
            found = self._plain()
        self._warm += 1
        return found

    def _go_on_without(self, why: str) -> None:
        """A loss that can't be compiled is computed as it is; nothing has been done with it yet."""
        warnings.warn(
            f"the step {why}; going on without. --compile off says so beforehand.", stacklevel=2
        )
        self.call = getattr(self.call, "_orig_mod", self.call)
        self.state.count_for_torch()
        self.update, self.compiled, self._capture = None, False, False

    def _plain(self) -> Tensor:
        """A step, one operation at a time."""
        numbers = self.state.numbers()
        x = self.stream.rows(self.first(), self.count)
        values = self.gradients(x, self.place())
        if not self._trusted:
            values = self._compared(values, x)
        if self.update is None:
            norms = self.state.clip_and_step(numbers)
            self.average.update(numbers.part)
        else:
            self.update.point()
            norms = self.update.use(self.listed(numbers))
        return row(values, norms)

    def _compared(self, values: Tensor, x: Tensor) -> Tensor:
        """The values of a first step; gradients, too, found anew where the compiler was wrong."""
        self._trusted = True
        network = self.loss.model.network
        training = network.training
        network.eval()
        try:
            with torch.no_grad():
                parts = self._parts(x, self.place())
                plain = torch.stack([self.loss(*part)[1] for part in parts]).mean(0)
        finally:
            network.train(training)
        found, wanted = values[0].item(), plain[0].item()
        size = plain[:4].abs().sum().item()  # of the loss and its parts, which may cancel
        if abs(found - wanted) <= CLOSE * size or not math.isfinite(size):
            return values
        self._go_on_without(
            f"has the loss {found:.4g} where it is compiled and {wanted:.4g} where it is not, "
            f"which is a mistake of torch {torch.__version__}"
        )
        return self.gradients(x, self.place())

    # ---------------------------------------------------------------- parts of a step

    @property
    def count(self) -> int:
        """Examples that this process does in a step."""
        return self.micro * self.training.accumulate

    def first(self) -> int:
        """The place of the first of them in the stream."""
        return self.state.step * self.training.batch + self.rank * self.count

    def place(self) -> Tensor:
        """That place, on the device: ()."""
        return torch.full((), self.first(), device=self.device)

    def listed(self, numbers: Numbers) -> Tensor:
        """What changes from step to step, on the device: (5,) float64."""
        found = torch.tensor(numbers.listed(self.training.optimiser), dtype=torch.float64)
        return found.to(self.device, non_blocking=True)

    def gradients(self, x: Tensor, first: Tensor) -> Tensor:
        """Those of all parts, added up, and what the parts tell: (6,) float64."""
        self.state.optimiser.zero_grad(set_to_none=True)
        values = torch.zeros(len(VALUES), dtype=torch.float64, device=self.device)
        for part, inputs in enumerate(self._parts(x, first)):
            last = part == self.training.accumulate - 1
            with unsynchronised(self.call, not last):
                loss, told = self.call(*inputs)
                (loss / self.training.accumulate).backward()
            values = _merged(values, told, part)
        return values

    def _parts(self, x: Tensor, first: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The examples that are done together, mirrored as they are to be, and their places."""
        places = first + torch.arange(self.count, device=self.device)
        for part in range(self.training.accumulate):
            here = slice(part * self.micro, (part + 1) * self.micro)
            yield self.stream.mirrored(x[here], places[here]), places[here]

    def _prepared(self) -> nn.Module:
        """The loss, shared over processes and compiled as asked for."""
        loss = wrapped(self.loss, self.device, unused=self.world > 1 and self._some_unused())
        if self.compiled:
            loss = compiling.compiled(loss, dynamic=False)
        return loss

    def _some_unused(self) -> bool:
        """Whether the loss leaves out a parameter, such as a learned rate that cancels."""
        x, model = self.stream.take(0, 1), self.loss.model
        self.loss(x, torch.zeros(1, dtype=torch.int64, device=self.device))[0].backward()
        unused = any(p.grad is None for p in model.parameters() if p.requires_grad)
        model.zero_grad(set_to_none=True)
        return unused

    # ---------------------------------------------------------------- the graph

    def _look_at_process(self) -> None:
        """Of a learned one: is its clock too fast? Inside a graph it can't see either that it has
        outgrown its panels."""
        process, done = self.loss.model.process, self.state.step
        if not (process.learned and done and done % LOOK == 0):
            return
        self._restrain(process)
        if not self.compiled:
            return
        process.replan()
        if self.graph is not None and not torch.equal(self.graph.plan, process.plan()):
            self.graph, self._warm = None, 0

    def _restrain(self, process: Process) -> None:
        """The first process decides for all; the mean is judged by its own clock.

        Adam's moments stay: they are forgotten in the steps that it takes to get so fast again.
        """
        mean, by, of_mean = self.average.model.process, 1.0, 1.0
        if self.rank == 0:
            by = process.restrain()
            of_mean = mean.restraint() if by != 1 else 1.0  # 1 if it is the process itself
        by, of_mean = agreed((by, of_mean), self.device)
        if by == 1:
            return
        if self.rank > 0:
            process.restrain(by)
        mean.restrain(of_mean)
        if self.rank == 0 and not self._told:
            warnings.warn(
                f"step {self.state.step}: the clock of {process.name!r} has run far past all data "
                f"and was slowed down: Q and D were multiplied by {by:.3g}. It is looked at again "
                f"every {LOOK} steps, without another word.",
                stacklevel=2,
            )
        self._told = True

    def _try_to_capture(self) -> None:
        now, seed = torch.cuda.current_stream(self.device), torch.initial_seed()
        try:
            # first without capturing: a capture that fails leaves torch's generator unusable
            x, place = self.stream.rows(self.first(), self.count), self.place()
            with self._aside(), compiling.waiting_refused(True):
                self.gradients(x, place)
            torch.manual_seed(seed)
            self.graph = Graph(self)
        except RuntimeError as error:  # what torch raises for an operation that can't be captured
            self._capture = False
            torch.cuda.set_stream(now)  # which a failed capture does not do
            torch.cuda.synchronize(self.device)
            torch.manual_seed(seed)
            warnings.warn(
                f"the step can't be captured in a CUDA graph ({compiling.first_line(error)}); it "
                "goes on one launch at a time, with the same numbers.",
                stacklevel=2,
            )

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """On a stream of its own, as a capture will be, with the fastest convolutions found."""
        if not self._capture:
            yield
            return
        stream, now = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(now)
        with torch.cuda.stream(stream), _searching():
            yield
        now.wait_stream(stream)


class Graph:
    """A step as one launch; everything that it reads stays where it is."""

    def __init__(self, runner: Runner) -> None:
        device, update = runner.device, runner.update
        if update is None:
            raise RuntimeError("Adam has no kernel for these parameters")
        self.x = runner.stream.rows(runner.first(), runner.count)
        self.first = torch.zeros((), dtype=torch.int64, device=device)
        self.numbers = torch.zeros(5, dtype=torch.float64, device=device)
        process = runner.loss.model.process
        # tables and buffers that a new plan, or loading other numbers, would let go
        self.held = dict(vars(process)), list(runner.loss.buffers())
        self.plan = process.plan()
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # what the first steps took: a graph has memory of its own
        with _searching(), compiling.capturing(self.graph):
            values = runner.gradients(self.x, self.first)
            self.row = row(values, update.use(self.numbers))
        update.point()

    def replay(self, runner: Runner) -> Tensor:
        """The next step."""
        runner.stream.rows(runner.first(), runner.count, out=self.x)
        self.first.fill_(runner.first())
        self.numbers.copy_(runner.listed(runner.state.numbers()))
        self.graph.replay()
        return self.row.clone()


@contextmanager
def _searching() -> Iterator[None]:
    """Let cuDNN try its convolutions and keep the fastest, unless repeatable ones are wanted."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    cudnn.benchmark = before or not cudnn.deterministic
    try:
        yield
    finally:
        cudnn.benchmark = before


def row(values: Tensor, norms: Tensor) -> Tensor:
    """Values and norms of a step in one: (8,) float64."""
    norms = norms.to(torch.float64)
    return torch.cat([values, nn.functional.pad(norms, (0, 2 - len(norms)))])


def _merged(values: Tensor, told: Tensor, part: int) -> Tensor:
    """Means over the parts of a step so far; of the worst error the largest."""
    if part == 0:
        return told
    means = values[:4] + (told[:4] - values[:4]) / (part + 1)
    worse = (told[4] >= values[4]) | ~told[4].isfinite()
    return torch.cat([means, torch.where(worse, told[4:], values[4:])])
