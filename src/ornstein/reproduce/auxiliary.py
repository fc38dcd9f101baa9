"""Does my model use its auxiliary variables? The paper's appendix B as numbers.

With r = E[y_s|x]/x, Σ = L Lᵀ given x, a = L⁻¹r and Gaussian data of variance ς², per coordinate:

    information  I(x; v_s) = ½ log(1 + ς² r_vᵀ Σ_vv⁻¹ r_v): what v_s alone knows of x
    added        I(x; v_s | z_s) = ½ log(1 + ς² Σ_{j>1} a_j² / (1 + ς² a₁²)): what v_s adds to z_s
    correlation  of z₀ and v_s: ς r_v / √(Σ_vv + ς² r_v²), variable by variable

v_s depends on x from the start if v₀ does, else exactly when the first column of (Q + D)S is not
zero below its diagonal, since A moves x nowhere else. The paper's sufficient condition, that Q + D
is not diagonal, is not enough: Q + D may be upper triangular, or only v₁ and v₂ may meet.
In the first of these the way back uses v nevertheless: v_s knows the noise in z_s, which is what
`added` measures.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ornstein.diagnostics import auxiliary_information
from ornstein.diffusion import Diffusion
from ornstein.matrices import Fixed
from ornstein.parts import described, rebuilt
from ornstein.process import Process
from ornstein.processes import PRESETS
from ornstein.provenance import provenance
from ornstein.reproduce.results import AVERAGED, row
from ornstein.schedules import Constant
from ornstein.training.opening import open_model
from ornstein.training.reading import read_run
from ornstein.transition import Transition

LEARNED = "learned"  # begins the names of processes that are asked
SETTINGS = ("tuning",)  # tables of many runs that are variations of one; they are not
TIMES = 200  # in equal steps up to the horizon
PRINTED = {"s": 0.1, "mean": [0.9003, -0.090]}  # of (x, 0), in parts of x


# ---------------------------------------------------------------- processes worth asking


def example() -> Diffusion:
    """The paper's example: Q turns, D = I, rate 1, v₀ ~ N(0, 1)."""
    return Diffusion(
        [[0.0, -1.0], [1.0, 0.0]],
        [[1.0, 0.0], [0.0, 1.0]],
        rate=Constant(1.0),
        v0_variance=1.0,
        name="the paper's example",
    )


def counter_example(n_aux: int = 1) -> Diffusion:
    """The paper's counter-example: Q = 0 and D diagonal, no two variables ever meet."""
    K = n_aux + 1
    Q = torch.zeros(K, K, dtype=torch.float64)
    return Diffusion(Q, torch.diag(0.5 + Q[0]), name="Q + D diagonal")


def one_way() -> Diffusion:
    """Q + D = [[1, −1], [0, 1]]: v moves z and never hears of it."""
    return Diffusion(
        [[0.0, -0.5], [0.5, 0.0]], [[1.0, -0.5], [-0.5, 1.0]], name="Q + D upper triangular"
    )


def apart() -> Diffusion:
    """v₁ and v₂ turn about each other, z is alone: Q + D is not diagonal, and v is of no use."""
    Q = [[0.0, 0.0, 0.0], [0.0, 0.0, -1.0], [0.0, 1.0, 0.0]]
    return Diffusion(Q, 0.5 * torch.eye(3, dtype=torch.float64), name="only v₁ and v₂ meet")


def known() -> dict[str, Process]:
    """The presets, and the examples of the paper and of this page."""
    found: dict[str, Process] = {name: make() for name, make in PRESETS.items()}
    examples = (example(), counter_example(), one_way(), apart())
    return found | {process.name: process for process in examples}


def of_run(folder: str | Path) -> Process:
    """The process of a run's best model, or of a saved one."""
    return open_model(folder).model.process


def of_runs(folders: Iterable[Path]) -> dict[str, Process]:
    """Learned processes of the runs of tables that are trained, by name."""
    found: dict[str, Process] = {}
    for folder in folders:
        if folder.parent.name in SETTINGS or not any(folder.glob("checkpoints/step-*")):
            continue
        try:
            if str(read_run(folder).process).startswith(LEARNED):
                found[f"{folder.parent.name}, {folder.name}"] = of_run(folder)
        except (ValueError, OSError) as error:
            warnings.warn(f"{folder} can't be read and is left out ({error}).", stacklevel=2)
    return found


def of_results(file: Path) -> dict[str, Process]:
    """Learned processes of a table's finished runs, wherever their weights are, by name.

    The table has Q and D of the model that was evaluated. What else may be learned it has not: such
    a process is left out.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not there, or not a table
        return {}
    if not isinstance(record, dict) or record.get("smoke") or record.get("table") in SETTINGS:
        return {}
    found: dict[str, Process] = {}
    for run in record.get("runs", []):
        if run["complete"] and run["learned"] and run["learned"]["of"] == AVERAGED:
            known = {key: described(Fixed(_matrix(run["learned"][key]))) for key in ("Q", "D")}
            process = rebuilt({**run["model"]["process"], **known}, "the process", Diffusion)
            if not process.learned:
                found[f"{record['table']}, {run['name']}"] = process
    return found


def _matrix(rows: list[list[float]]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


# ---------------------------------------------------------------- what they know


def auxiliary(processes: Mapping[str, Process], data_variance: float) -> dict[str, Any]:
    """What the auxiliary variables of each process know of x, over time and in figures."""
    if not processes:
        raise ValueError("auxiliary was given no process; expected one or more, by name.")
    good = isinstance(data_variance, (int, float)) and math.isfinite(data_variance)
    if not (good and data_variance > 0):
        raise ValueError(
            f"data_variance={data_variance!r}; expected a positive number, per data coordinate."
        )
    return {
        "data_variance": float(data_variance),
        "processes": {name: _look(process, data_variance) for name, process in processes.items()},
        "example": example_mean(),
        "provenance": provenance(),
    }


def example_mean() -> dict[str, Any]:
    """The mean of the paper's example by its kernel, beside what the paper prints."""
    at = float(str(PRINTED["s"]))
    mean = example().transition(at).response.tolist()
    exact = [math.exp(-at) * math.cos(at), -math.exp(-at) * math.sin(at)]
    return {"s": at, "mean": mean, "exact": exact, "printed": PRINTED["mean"]}


@torch.no_grad()
def _look(process: Process, variance: float) -> dict[str, Any]:
    """Of one process: curves over time, and what is read off them."""
    steps = torch.arange(1, TIMES + 1, dtype=torch.float64, device=process.device) / TIMES
    times = process.horizon * steps
    kernel = process.transition(times)
    information = auxiliary_information(kernel, variance)
    correlation = correlations(kernel, variance)  # (n, K − 1)
    response = kernel.response[:, 1:]
    peak = int(information.argmax())
    tied = correlation.abs().amax(-1) if process.n_vars > 1 else torch.zeros_like(times)
    added, snr = added_information(kernel, variance), variance * kernel.snr
    # when the noise about x is as large as x; a short horizon may not get there
    even = float(process.time_of_noise(math.sqrt(variance))) if float(snr[-1]) < 1 else None
    return {
        "n_vars": process.n_vars,
        "column": _column(process),
        "knows": bool((information > 0).any()),
        "adds": bool((added > 0).any()),
        "times": times.tolist(),
        "information": information.tolist(),
        "added": added.tolist(),
        "whole": (0.5 * torch.log1p(snr)).tolist(),  # I(x; y_s)
        "response": response.mT.tolist(),  # a list for each auxiliary variable
        "correlation": correlation.mT.tolist(),
        "most": float(information[peak]),
        "most_at": float(times[peak]) if information[peak] > 0 else None,
        "largest_response": float(response.abs().max()) if process.n_vars > 1 else 0.0,
        "largest_correlation": float(tied.max()),
        "even_at": even,
        "added_there": None
        if even is None
        else float(added_information(process.transition(even), variance)),
        "left": {
            "information": float(information[-1]),
            "correlation": float(tied[-1]),
            "whole": float(0.5 * torch.log1p(snr[-1])),  # I(x; y_T)
        },
    }


def added_information(kernel: Transition, data_variance: float) -> Tensor:
    """I(x; v_s | z_s) in nats per coordinate for Gaussian data: (...). Zero for K = 1."""
    squares = kernel.signal.square()
    own = 1 + data_variance * squares[..., 0]
    return 0.5 * torch.log1p(data_variance * squares[..., 1:].sum(-1) / own)


def correlations(kernel: Transition, data_variance: float) -> Tensor:
    """Of z₀ with each auxiliary variable: (..., K − 1)."""
    signal = math.sqrt(data_variance) * kernel.response[..., 1:]
    noise = torch.linalg.vector_norm(kernel.cholesky[..., 1:, :], dim=-1)
    return signal / torch.hypot(signal, noise)


def _column(process: Process) -> list[float] | None:
    """(Q + D)S below the diagonal of its first column, where there are a Q and a D."""
    if not isinstance(process, Diffusion):
        return None
    return ((process.Q + process.D) @ process.S)[1:, 0].tolist()


# ---------------------------------------------------------------- for people


def rows(record: dict[str, Any]) -> list[str]:
    """The lines of a Markdown table, nats per coordinate."""
    heads = [
        "process",
        "K",
        "v knows x",
        "v adds to z",
        "max I(x; v_s)",
        "at s",
        "max abs. correlation",
        "I(x; v_s given z_s) where noise = data",
        "left at T: I(x; v)",
        "I(x; y)",
    ]
    table = [row(heads), row(["---", "---:", "---", "---", *["---:"] * 6])]
    for name, found in record["processes"].items():
        left = found["left"]
        figures = [
            found["most"],
            found["most_at"],
            found["largest_correlation"],
            found["added_there"],
            left["information"],
            left["whole"],
        ]
        told = ["yes" if found[which] else "no" for which in ("knows", "adds")]
        table.append(row([name, str(found["n_vars"]), *told, *map(_shown, figures)]))
    return table


def _shown(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.3g}"
