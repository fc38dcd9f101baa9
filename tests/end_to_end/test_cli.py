"""The commands as a user types them: true figures, real pictures, helpful mistakes."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.image import imread
from scipy.linalg import expm

import ornstein
from ornstein.cli import main

ROOT = Path(__file__).resolve().parents[2]
TAU = 10.05  # ∫ of the default rate, 0.1 + 19.9 s, over the horizon
SHARP = 2 / 255 / 6
OWN = ("--Q", "[[0,-1],[1,0]]", "--D", "[[0,0],[0,1]]")
SPACING = 10 ** (5 / 299)  # ratio of neighbouring short times


def ornstein_command(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -m ornstein …` in a terminal of 80 columns."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8",
    }
    return subprocess.run(
        [sys.executable, "-m", "ornstein", *args],
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=environment,
        cwd=cwd,
        timeout=300,
        check=False,
    )


def exit_code(args: list[str]) -> int | str | None:
    """The same without a new interpreter, where only the exit code and the words matter."""
    try:
        return main(args)
    except SystemExit as stop:  # what the parser itself refuses, and --help
        return stop.code


def figures(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of figures.json by name."""
    record = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return {row["name"]: row for row in record["processes"]}


def vpsde_time(tau: float) -> float:
    """When the default clock 0.1 s + 9.95 s² shows tau."""
    return (-0.1 + math.sqrt(0.01 + 4 * 9.95 * tau)) / (2 * 9.95)


def check_picture(path: Path) -> None:
    """A PNG that decodes, is large enough to read, and has ink in all its quarters."""
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = imread(path)[..., :3]
    height, width = pixels.shape[:2]
    assert width >= 1500
    assert height >= 900
    for rows in np.array_split(pixels, 2, axis=0):
        for part in np.array_split(rows, 2, axis=1):
            assert part.std() > 0.02
            assert 0.6 < np.mean(part.min(-1) > 0.99) < 0.995  # paper and ink
    levels = (pixels * 255).astype(np.int64) @ np.array([1, 256, 65536])
    assert len(np.unique(levels)) > 50  # colours


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the terminal of one `ornstein inspect all`, and a process of one's own."""
    home = tmp_path_factory.mktemp("zoo")
    own = ["--Q", "[[0,-1],[1,0]]", "--D", "[[0,0],[0,1]]"]
    done = ornstein_command("inspect", "all", *own, cwd=home)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return home / "runs" / "inspect", done.stdout


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Several processes under data of a mean and variance of their own."""
    out = tmp_path_factory.mktemp("inspect")
    data = ("--data-variance", "0.3", "--data-mean", "0.5")
    done = ornstein_command("inspect", "vpsde", "cld", "learned-1", *OWN, *data, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_zoo_shows_every_process(zoo: tuple[Path, str]) -> None:
    folder, terminal = zoo
    names = [*ornstein.PRESETS, "learned-2", "own"]
    assert list(figures(folder)) == names
    for name in names:
        assert re.search(rf"^{name} +\d ", terminal, re.MULTILINE)
        check_picture(folder / f"{name}.png")
    check_picture(folder / "overview.png")
    assert "…" not in terminal  # no cell is cut off at 80 columns
    written = {Path(line[6:]).name for line in terminal.splitlines() if line.startswith("wrote ")}
    assert written == {path.name for path in folder.iterdir()}


def test_the_zoo_says_where_its_figures_come_from(zoo: tuple[Path, str]) -> None:
    record = json.loads((zoo[0] / "figures.json").read_text(encoding="utf-8"))
    assert record["ornstein"] == ornstein.__version__
    assert record["data"] == {"variance": 0.25, "mean": 0.0}
    assert {"torch", "python", "cpu", "commit"} <= set(record)


def test_the_zoo_knows_what_never_happens(zoo: tuple[Path, str]) -> None:
    rows = figures(zoo[0])
    assert rows["vesde"]["forgotten_at"] is None  # it has no drift: the mean stays
    assert all(row["sharp_until"] is not None for row in rows.values())
    for name in ("vpsde", "subvpsde", "vesde"):
        assert rows[name]["auxiliary_information"] == 0.0
        assert rows[name]["condition"] == pytest.approx(1.0, rel=1e-14)


def test_vesde_signal_to_noise(zoo: tuple[Path, str]) -> None:
    record = json.loads((zoo[0] / "curves.json").read_text(encoding="utf-8"))
    curve = record["curves"]["vesde"]
    growth = 2 * math.log(50 / 0.01)
    truth = 1 / (0.01**2 * np.expm1(growth * np.array(curve["times"])))
    np.testing.assert_allclose(curve["snr"], truth, rtol=1e-10)


def test_prior_gap_of_vpsde_is_the_closed_form(inspected: tuple[Path, str]) -> None:
    folder, terminal = inspected
    signal = math.exp(-TAU)
    gap = 0.5 * (-signal - math.log1p(-signal) + signal * (0.3 + 0.5**2)) / math.log(2)
    assert figures(folder)["vpsde"]["prior_gap_bits"] == pytest.approx(gap, rel=1e-9)
    assert f"{gap:.1e}" in next(line for line in terminal.splitlines() if "vpsde" in line)


def test_times_of_vpsde_are_the_closed_forms(inspected: tuple[Path, str]) -> None:
    row = figures(inspected[0])["vpsde"]
    sharp = vpsde_time(math.log1p(SHARP**2))  # SNR = 1/(e^τ − 1)
    assert sharp * 0.999 <= row["sharp_until"] <= sharp * SPACING * 1.001
    forgotten = vpsde_time(2 * math.log(100))  # Φ = e^(−τ/2)
    assert forgotten - 1e-3 <= row["forgotten_at"] <= forgotten + 0.005 + 1e-3
    assert row["slowest_rate"] == pytest.approx(0.5, rel=1e-12)


def test_own_matrices_agree_with_scipy(inspected: tuple[Path, str]) -> None:
    A = np.array([[0.0, -1.0], [1.0, 1.0]])
    Phi = expm(-TAU * A)
    Sigma = np.eye(2) + Phi @ (np.diag([0.0, 0.04]) - np.eye(2)) @ Phi.T
    trace = np.trace(Sigma) + (0.3 + 0.5**2) * Phi[:, 0] @ Phi[:, 0]
    gap = 0.5 * (trace - 2 - np.linalg.slogdet(Sigma)[1]) / math.log(2)
    row = figures(inspected[0])["own"]
    assert row["prior_gap_bits"] == pytest.approx(gap, rel=1e-7)  # the truth itself cancels
    assert row["commutes"] is True
    assert row["slowest_rate"] == pytest.approx(0.5, rel=1e-12)


def test_diagonal_matrices_leave_the_auxiliary_variable_unused(tmp_path: Path) -> None:
    matrices = ["--Q", "[[0,0],[0,0]]", "--D", "[[0.5,0],[0,1]]"]
    assert exit_code(["inspect", *matrices, "--out", str(tmp_path)]) == 0
    assert figures(tmp_path)["own"]["auxiliary_information"] == 0.0


def test_two_clocks(tmp_path: Path) -> None:
    done = ornstein_command(
        *("inspect", *OWN, "--S", "[[1,0],[0,4]]"),
        *("--rate-q", "5", "5", "--rate-d", "0.1", "10", "--out", str(tmp_path)),
    )
    assert done.returncode == 0, done.stderr
    assert figures(tmp_path)["own"]["commutes"] is False
    assert not (tmp_path / "overview.png").exists()  # there is nothing to compare
    check_picture(tmp_path / "own.png")


def test_rate_sets_the_clock(tmp_path: Path) -> None:
    assert exit_code(["inspect", "vpsde", "--rate", "3", "3", "--out", str(tmp_path)]) == 0
    curve = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))["curves"]["vpsde"]
    truth = 1 / np.expm1(3 * np.array(curve["times"]))
    np.testing.assert_allclose(curve["snr"], truth, rtol=1e-10)


def test_horizon_and_initial_variance_of_an_own_process(tmp_path: Path) -> None:
    options = ["--rate", "3", "3", "--horizon", "2", "--v0-variance", "[0.3]"]
    assert exit_code(["inspect", *OWN, *options, "--out", str(tmp_path)]) == 0
    curve = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))["curves"]["own"]
    assert curve["times"][-1] == 2.0
    Phi = expm(-6 * np.array([[0.0, -1.0], [1.0, 1.0]]))
    Sigma = np.eye(2) + Phi @ np.diag([-1.0, 0.3 - 1.0]) @ Phi.T
    snr = Phi[:, 0] @ np.linalg.solve(Sigma, Phi[:, 0])
    assert curve["snr"][-1] == pytest.approx(snr, rel=1e-10)


def test_horizon_of_a_preset(tmp_path: Path) -> None:
    options = ["--rate", "3", "3", "--horizon", "2"]
    assert exit_code(["inspect", "vpsde", *options, "--out", str(tmp_path)]) == 0
    curve = json.loads((tmp_path / "curves.json").read_text(encoding="utf-8"))["curves"]["vpsde"]
    assert curve["snr"][-1] == pytest.approx(1 / math.expm1(6), rel=1e-10)


def test_a_name_that_is_repeated_is_numbered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["inspect", "vpsde", "vesde", "vpsde", "--out", str(tmp_path)]) == 0
    assert list(figures(tmp_path)) == ["vpsde (1)", "vesde", "vpsde (2)"]
    assert {path.stem for path in tmp_path.glob("vpsde*.png")} == {"vpsde-1", "vpsde-2"}
    assert "vpsde (2)" in capsys.readouterr().out


def test_a_gap_below_rounding_is_not_spelt_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["inspect", "cld", "--rate", "30", "300", "--out", str(tmp_path)]) == 0
    assert "< 1e-16" in capsys.readouterr().out
    assert abs(figures(tmp_path)["cld"]["prior_gap_bits"]) < 1e-16


def test_what_is_noisy_from_the_start_was_never_sharp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["inspect", "vpsde", "--rate", "3", "3", "--out", str(tmp_path)]) == 0
    assert figures(tmp_path)["vpsde"]["sharp_until"] is None  # √(3·1e-5) is more than a pixel's ⅙
    row = next(line for line in capsys.readouterr().out.splitlines() if "vpsde" in line)
    assert row.split()[5] == "—"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["inspect", "clld"], ["no preset 'clld'", "vpsde, subvpsde", "Perhaps you meant 'cld'"]),
        (["inspect"], ["nothing to inspect", "ornstein inspect cld"]),
        (["inspect", "--Q", "[[0]]"], ["needs both --Q and --D"]),
        (["inspect", "--Q", "[[0", "--D", "[[1]]"], ["not JSON", "--Q '[[0,-1],[1,0]]'"]),
        (["inspect", "--Q", "3", "--D", "[[1]]"], ["a list of rows"]),
        (["inspect", "--Q", "[[0,1],[1,0]]", "--D", "[[1,0],[0,1]]"], ["not skew-symmetric"]),
        (["inspect", "--Q", "[[0,-1],[1,0]]", "--D", "[[1]]"], ["Q is 2×2 and D is 1×1"]),
        (["inspect", "--Q", "[[0]]", "--D", "[[-1]]"], ["eigenvalue -1"]),
        (["inspect", "vesde", "--rate", "1", "2"], ["'vesde' has no rate"]),
        (["inspect", "cld", "--rate", "-1", "2"], ["positive"]),
        (["inspect", "cld", "--rate-q", "1", "2"], ["go with --Q and --D"]),
        (["inspect", "cld", "--v0-variance", "1"], ["go with --Q and --D"]),
        (["inspect", *OWN, "--v0-variance", "wide"], ["not JSON", "a number, a list"]),
        (["inspect", *OWN, "--v0-variance", "-1"], ["v0_variance", "-1"]),
        (["inspect", "cld", "--horizon", "-1"], ["horizon", "-1"]),
        (["inspect", "--q", "[[0]]", "--D", "[[1]]"], ["no option --q", "perhaps you meant --Q"]),
        (["inspect", "cld", "--Rate=1"], ["no option --Rate", "perhaps you meant --rate"]),
        (["inspect", "cld", "--data-variance", "-1"], ["variance ≥ 0"]),
        (["inspect", "cld", "--out", "/dev/null/folder"], ["/dev/null/folder"]),
        (["inspect", "cld", "--color", "red"], ["--color"]),
        (["inspct"], ["inspct", "inspect"]),
        ([], ["quickstart"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_explained(
    args: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert exit_code(args) == 2
    said = capsys.readouterr().err
    for words in expected:
        assert words in said
    assert not list(tmp_path.rglob("*.png"))


def test_a_mistake_is_one_line_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "triton").mkdir()  # which is not the package of that name
    done = ornstein_command("inspect", "clld", cwd=tmp_path)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr.startswith("error: there is no preset 'clld'")
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "triton"]


@pytest.mark.parametrize("command", [[], ["quickstart"], ["inspect"]], ids=" ".join)
def test_help_has_examples(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code([*command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "examples:" in said
    assert f"ornstein {' '.join(command)}".strip() in said
    assert "default: None" not in said
    assert "default: )" not in said
