"""What a run keeps while it trains: its config, its metrics, its checkpoints.

Only the first of several processes writes; all of them read when a run goes on.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ornstein import sharing
from ornstein.data import Dataset
from ornstein.ledger import agree, processes
from ornstein.parts import described
from ornstein.score import ScoreModel
from ornstein.training.checkpoints import Checkpoint, Checkpoints
from ornstein.training.options import Training
from ornstein.training.records import differences, to_record
from ornstein.training.run import Run
from ornstein.training.state import State
from ornstein.training.stopping import Diverged


def run_record(
    model: ScoreModel,
    data: Dataset,
    training: Training,
    given: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What decides a run, as its config keeps it."""
    record: dict[str, Any] = {} if given is None else {"experiment": dict(given)}
    record["training"] = to_record(training)
    try:
        record["model"] = described(model)
    except ValueError:  # a network or a process of the user's own
        record["model"] = {"network": type(model.network).__name__}
    record["data"] = data.describe()
    return record


class Keeper:
    """Keeps a run in its folder; without one it keeps nothing."""

    def __init__(
        self,
        folder: str | Path | None,
        model: ScoreModel,
        data: Dataset,
        training: Training,
        given: Mapping[str, Any] | None,
    ) -> None:
        self.model, self.data, self.training = model, data, training
        self.first_process = processes()[0] == 0
        self.run = None if folder is None else Run(Path(folder))
        self.record: dict[str, Any] = {}
        if self.run is not None:
            self.record = run_record(model, data, training, given)
            self.run.check(self.record)
            self.checkpoints = Checkpoints(self.run.folder / "checkpoints", training.watch.keep)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """For as long as the run lasts."""
        if self.run is not None and self.first_process:
            with self.run.locked():
                yield
        else:
            yield

    def note(self, line: dict[str, Any]) -> None:
        """One more line of metrics."""
        if self.run is not None and self.first_process:
            self.run.note(line)

    def due(self, state: State, improved: bool) -> bool:
        """Whether a checkpoint is to be written now."""
        if self.run is None or not self.first_process:
            return False
        watch = self.training.watch
        if improved or state.step == self.training.steps:
            return True
        if watch.save_every:
            return state.step % watch.save_every == 0
        return time.monotonic() - state.saved_at > 60 * watch.save_minutes

    def save(self, state: State) -> None:
        """Write a checkpoint of good numbers; by the first process alone."""
        if self.run is None or not self.first_process:
            return
        bad = state.first_bad()
        if bad is not None:
            raise Diverged(state.explained(*bad) + self.last_good())
        best = state.best
        figures = None
        if best is not None and best["step"] == state.step:
            figures = {**best, "split": "validation", "bound": self.model.likelihood.name}
        path = self.checkpoints.save(
            state.step,
            self.settled(state),
            state.tensors(),
            state.record(),
            None if best is None else best["step"],
            figures,
            self.data.describe(),
        )
        state.saved_at, state.saved, state.checkpoint = time.monotonic(), state.step, path

    def resume(self, state: State) -> None:
        """Go on from the newest checkpoint, if there is one."""
        if self.run is not None:
            found = self.checkpoints.latest()
            if found is not None:
                self._check_same(found)
                state.restore(found)
            if not agree([state.step], self.model.process.device):
                raise ValueError(
                    "the processes found different checkpoints; expected one folder that all of "
                    "them see. Put the run on a shared disk."
                )
            if self.first_process:
                self.run.begin(self.record, state.step)
        state.started()

    def leave(self, state: State) -> None:
        """Save what is good and not saved yet."""
        if self.run is not None and state.saved != state.step and state.first_bad() is None:
            self.save(state)

    def settled(self, state: State) -> ScoreModel:
        """The averaged model, ready to be used; one that nobody could use again is not kept."""
        try:
            return state.average.settle()
        except ValueError as error:  # a process that is too stiff to be planned anew
            raise Diverged(f"step {state.step}: {error}{self.last_good()}") from error

    def last_good(self) -> str:
        """What is left of a run whose numbers went bad."""
        if self.run is None:
            return ""
        steps = [step for step, _ in self.checkpoints.all()]
        if not steps:
            return " There is no checkpoint yet."
        return f" The last good checkpoint is that of step {steps[-1]}."

    def _check_same(self, found: Checkpoint) -> None:
        """A checkpoint that was copied here from a run of another model is refused."""
        own = json.loads(json.dumps(self.record["model"]))
        known = own.pop("kind", None) is not None  # nothing is known of a class of the user's own
        changed = differences(sharing.read(found.folder).model, own) if known else []
        if changed:
            lines = "\n  ".join(changed)
            raise ValueError(
                f"{found.folder} is of another model:\n  {lines}\nExpected the network and the "
                "process of this run. Remove what was copied here from another one."
            )
