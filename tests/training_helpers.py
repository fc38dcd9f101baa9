"""What the tests of training share: commands in processes of their own, and runs compared.

Importing torch takes seconds, and these tests need some hundred processes. So one process imports
everything and forks for each command: `start` and `run` give a real process, with a number that
signals can be sent to, that has done nothing yet but import. `typed` is the whole way, as a user
goes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TIMES = ("seconds", "examples_per_second")  # what no two runs share
BATCH = 8
Said = Callable[..., tuple[int, str, str]]  # exit code, stdout and stderr of a command

TINY = ("--width", "8", "--multipliers", "1", "--blocks", "1", "--batch", str(BATCH))
QUIET = ("--valid-every", "0", "--sample-every", "0")
COMMAND = "tests.training_helpers:ornstein"


def environment() -> dict[str, str]:
    """That of a command."""
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
        "ORNSTEIN_COMMIT": "0123456789ab",  # asking git takes longer than these runs
    }


@dataclass(frozen=True)
class Ended:
    """What a command left behind; the code is −n if signal n killed it."""

    code: int
    out: str
    err: str


# ---------------------------------------------------------------- the whole way


def typed(*args: str, cwd: Path, module: str = "ornstein") -> subprocess.Popen[str]:
    """`python -m ornstein …`, started."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env=environment(),
        cwd=cwd,
    )


def ended(process: subprocess.Popen[str], seconds: float = 240) -> Ended:
    """Wait for it."""
    out, err = process.communicate(timeout=seconds)
    return Ended(process.returncode, out, err)


# ---------------------------------------------------------------- forked


class Started:
    """A command on its way."""

    def __init__(self, base: Path) -> None:
        self.base = base

    @property
    def pid(self) -> int:
        """The number of its process."""
        return int(waited(lambda: _read(self.base / "pid")))

    @property
    def code(self) -> int | None:
        """How it ended, once it has."""
        found = _read(self.base / "code")
        return None if found is None else int(found)

    def tell(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float = 240) -> Ended:
        """Until it has ended."""
        code = int(waited(lambda: _read(self.base / "code"), seconds))
        texts = ((self.base / name).read_text(encoding="utf-8") for name in ("out", "err"))
        return Ended(code, *texts)


class _Server:
    """The process that forks."""

    def __init__(self) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="ornstein-commands-")
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from tests.training_helpers import _serve; _serve()"],
            stdin=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        self.count = itertools.count()

    def start(self, order: dict[str, Any]) -> Started:
        base = Path(self.folder.name) / str(next(self.count))
        base.mkdir()
        pipe = self.process.stdin
        assert pipe is not None
        pipe.write(json.dumps({**order, "base": str(base)}) + "\n")
        pipe.flush()
        return Started(base)


_server: _Server | None = None


def start(
    *args: str,
    cwd: Path,
    call: str = COMMAND,
    more: Mapping[str, str] | None = None,
) -> Started:
    """Call module:function with these arguments; by default `ornstein args`."""
    global _server
    if _server is None or _server.process.poll() is not None:
        _server = _Server()
    return _server.start(
        {
            "args": list(args),
            "cwd": str(cwd.absolute()),
            "call": call,
            "environment": dict(more or {}),
        }
    )


def run(*args: str, cwd: Path, call: str = COMMAND, more: Mapping[str, str] | None = None) -> Ended:
    """The same, waited for."""
    return start(*args, cwd=cwd, call=call, more=more).wait()


def ornstein(*args: str) -> int:
    """What `python -m ornstein` does."""
    from ornstein.cli import main

    try:
        return main(args)
    except SystemExit as stop:  # what the parser itself refuses, and --help
        return stop.code if isinstance(stop.code, int) else 1


def free_port() -> int:
    """For processes to meet at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def together(
    *args: str,
    cwd: Path,
    count: int = 2,
    call: str = COMMAND,
    more: Mapping[str, str] | None = None,
) -> list[Started]:
    """So many processes that know each other, as torchrun starts them."""
    port = free_port()
    return [
        start(
            *args,
            cwd=cwd,
            call=call,
            more={
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **(more or {}),
            },
        )
        for rank in range(count)
    ]


def _serve() -> None:
    """Fork for each line of stdin, until it is closed."""
    import torch
    import torch._dynamo  # what the first optimiser imports, in a second

    import ornstein.cli  # noqa: F401

    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            _guard(json.loads(line))


def _guard(order: dict[str, Any]) -> None:
    """A process between, that waits for the one that works."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    base = Path(order["base"])
    pid = os.fork()
    if pid == 0:
        _work(order, base)
    _write(base / "pid", str(pid))
    _, status = os.waitpid(pid, 0)
    _write(base / "code", str(os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _work(order: dict[str, Any], base: Path) -> None:
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(base / name, os.O_WRONLY | os.O_CREAT, 0o644), number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(order["environment"])
        os.chdir(order["cwd"])
        module, name = order["call"].split(":")
        code = int(getattr(importlib.import_module(module), name)(*order["args"]) or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _read(path: Path) -> str | None:
    return path.read_text() if path.exists() else None


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)


def waited(found: Callable[[], Any], seconds: float = 60) -> Any:
    """What this returns, as soon as it returns something."""
    end = time.monotonic() + seconds
    while not (value := found()):
        if time.monotonic() > end:
            raise TimeoutError(f"nothing after {seconds} s")
        time.sleep(0.002)
    return value


# ---------------------------------------------------------------- commands that are hit


def signalled(number: str, step: str, *args: str) -> int:
    """`ornstein args` that gets a signal in the middle of a step."""
    from ornstein.data import Stream

    rows = Stream.rows

    def gathering(stream: Stream, first: int, *rest: Any) -> Any:
        if first // BATCH == int(step) - 1:
            os.kill(os.getpid(), int(number))
        return rows(stream, first, *rest)

    Stream.rows = gathering  # type: ignore[method-assign]
    return ornstein(*args)


def one_signalled(number: str, step: str, *args: str) -> int:
    """The same, but only the last of two processes is hit."""
    return signalled(number, step if os.environ["RANK"] == "1" else "-1", *args)


def hit_writing(how: str, count: str, *args: str) -> int:
    """`ornstein args` whose count-th change of the disk does not happen."""
    _hit(how, int(count))
    return ornstein(*args)


def hit_fitting(count: str, folder: str) -> int:
    """Three steps of `fit`, each saved, killed at the count-th change of the disk (0: never)."""
    import torch

    from ornstein import Continuous, ScoreModel, Training, Watch, fit, vpsde
    from ornstein.networks import MLP

    if int(count):
        _hit("kill", int(count))
    torch.manual_seed(0)
    model = ScoreModel(MLP((3,), None, 0, 8, 1, 0.1), vpsde(), Continuous())
    watch = Watch(log_every=1, valid_every=0, sample_every=0, save_every=1, keep=1)
    for _ in fit(model, torch.randn(16, 3), Training(3, 4, watch=watch), folder=folder):
        pass
    return 0


def _hit(how: str, count: int) -> None:
    """From the count-th sync, rename or removal on: be killed, or be told that the disk is full."""
    seen = itertools.count(1)

    def wrapped(name: str) -> None:
        change = getattr(os, name)

        def changing(*these: Any, **those: Any) -> Any:
            if next(seen) >= count and (how == "kill" or name == "fsync"):
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(these[0]))
            return change(*these, **those)

        setattr(os, name, changing)

    for name in ("fsync", "replace", "unlink", "rmdir"):
        wrapped(name)


def listening(file: str, *args: str) -> int:
    """`ornstein args` that writes down which noise and log SNR the examples had, by their place."""
    import numpy as np

    from ornstein import Counted
    from ornstein.training import loss

    normal, elbo = Counted.normal, loss.elbo
    found: dict[str, list[Any]] = {"place": [], "noise": [], "logsnr": []}

    def drawing(draws: Counted, purpose: str, *how: Any) -> Any:
        values = normal(draws, purpose, *how)
        if purpose == "noise":
            found["place"] += draws.index.tolist()
            found["noise"] += values.flatten(1).tolist()
        return values

    def bounding(*these: Any, **options: Any) -> Any:
        bound = elbo(*these, **options)
        found["logsnr"] += bound.logsnr.tolist()
        return bound

    Counted.normal, loss.elbo = drawing, bounding  # type: ignore[method-assign]
    code = ornstein(*args)
    np.savez(f"{file}-{os.environ.get('RANK', '0')}.npz", **found)
    return code


def leaving(count: str) -> int:
    """Leave the other processes while a model that was shared with them is still held."""
    import torch

    from ornstein.ledger import any_failed
    from ornstein.training.distribution import joined, wrapped

    cpu = torch.device("cpu")
    for number in range(int(count)):
        place = Path(f"port-{number}")
        if os.environ["RANK"] == "0":
            _write(place, str(free_port()))
        os.environ["MASTER_PORT"] = waited(lambda place=place: _read(place))
        with joined(cpu):
            shared = wrapped(torch.nn.Linear(8, 8), cpu, unused=False)
            shared(torch.ones(2, 8)).sum().backward()
            any_failed(False, cpu)
        del shared
    return 0


# ---------------------------------------------------------------- runs


def lines(folder: Path) -> list[dict[str, Any]]:
    """All metrics of a run; every line must be whole."""
    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def reached(folder: Path, step: int) -> bool:
    """Whether the metrics of a run have come to this step."""
    path = folder / "metrics.jsonl"
    return path.exists() and f'"step": {step},' in path.read_text(encoding="utf-8")


def steps_kept(folder: Path) -> list[int]:
    """Steps of the checkpoints of a run, oldest first."""
    return sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-????????"))


def checkpoint(folder: Path, step: int | None = None) -> Path:
    """One of a run, by default the last."""
    return folder / "checkpoints" / f"step-{steps_kept(folder)[-1] if step is None else step:08d}"


def state(folder: Path, step: int | None = None) -> dict[str, Any]:
    """What a checkpoint says."""
    return json.loads((checkpoint(folder, step) / "state.json").read_text(encoding="utf-8"))


def outcome(folder: Path) -> dict[str, Any]:
    """Everything about a finished run that must not depend on how it was interrupted."""
    last = checkpoint(folder)
    # checksums are those of the files below, and of the seconds too
    kept = {k: v for k, v in state(folder).items() if k not in (*TIMES, "files", "checksum")}
    weights = ("training.safetensors", "model.safetensors")
    config = json.loads((last / "config.json").read_text(encoding="utf-8"))
    config.pop("provenance")  # the machine, as it was just then
    return {
        "metrics": [{k: v for k, v in line.items() if k not in TIMES} for line in lines(folder)],
        "checkpoints": steps_kept(folder),
        "state": kept,
        "config.json": config,
        **{name: (last / name).read_bytes() for name in weights},
        "pictures": {p.name: p.read_bytes() for p in (folder / "samples").glob("*")},
    }


def check_same(found: Path, truth: Path, but: tuple[str, ...] = ()) -> None:
    """Two runs came to the same, bit for bit; of files that differ the names are shown."""
    one, other = outcome(found), outcome(truth)
    for name in ("metrics", "state", "checkpoints"):
        if name not in but:
            assert one[name] == other[name], f"{name}: {one[name]}\nexpected: {other[name]}"
    pictures = sorted(one["pictures"]), sorted(other["pictures"])
    assert pictures[0] == pictures[1], pictures
    different = [name for name, value in other.items() if name not in but and one[name] != value]
    assert not different, different


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured() -> int:
    """Print the estimated bytes of a forward pass, and those that it really holds."""
    import ctypes

    import torch

    from ornstein.data import load
    from ornstein.training import preset
    from ornstein.training.estimating import estimate
    from ornstein.training.loss import Loss

    # M_MMAP_THRESHOLD: what is freed goes back to the system at once, and does not count any more
    ctypes.CDLL(None).mallopt(-3, 1 << 16)
    experiment, data = preset("digits"), load("digits")
    training = dataclasses.replace(experiment.training, batch=1024)
    model = experiment.build(data)
    found = estimate(model, data, training)
    loss = Loss(model, training.objective, training.seed, narrow=False)
    x, index = data.train.x[:1024], torch.arange(1024)
    loss(x, index)[0].backward()
    before = resident()
    value = loss(x, index)[0]
    held = resident() - before
    value.backward()
    print(json.dumps([found.activation_bytes, held]))
    return 0
