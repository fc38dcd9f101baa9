"""`ornstein bench` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ornstein.bench import PARTS
from ornstein.bench.stock import stock_name
from tests.training_helpers import Said

LOOK = ("bench", "--device", "cpu", "--quick")


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def test_parts_add_up_in_one_file(tmp_path: Path, said: Said) -> None:
    """Tables on the screen, the same figures in the file, another part later, and a picture."""
    file, picture = tmp_path / "bench.json", tmp_path / "roofline.png"
    out_to = ("--out", str(file))
    code, out, err = said(*LOOK, "--parts", "kernel", *out_to)
    assert code == 0, err
    first = read(file)
    assert list(first["parts"]) == ["kernel"] and first["device"] == "cpu" and first["quick"]
    (table,) = first["parts"]["kernel"]["tables"]
    assert table["title"] in out and f"wrote {file}" in out
    ours, by_hand, *copies = table["lines"]
    assert (ours["items"], ours["ratio"], len(copies)) == (32, 1.0, 2)
    assert ours["flops"] == 32 * 3072 * 8 and ours["bytes"] == 32 * 3072 * 20
    assert f"{by_hand['ratio']:.3g}" in out
    code, out, err = said(*LOOK, "--parts", "rest", *out_to, "--plot", str(picture))
    assert code == 0, err
    both = read(file)
    assert both["parts"]["kernel"] == first["parts"]["kernel"]
    (rest,) = both["parts"]["rest"]["tables"]
    lines = {line["name"]: line for line in rest["lines"]}
    whole, network = lines["whole step"], lines["network, forward and backward"]
    outside = lines["the rest: whole step − network"]
    assert outside["ratio"] == pytest.approx(1 - network["ratio"])
    assert outside["seconds"] == pytest.approx(outside["ratio"] * whole["seconds"])
    assert f"{outside['ratio']:.1%}" in out
    for record in (both, both["parts"]["rest"], both["parts"]["kernel"]):
        assert record["provenance"]["commit"] == "0123456789ab"
    assert both["ceilings"]["flops"] > 1e8 and both["stock"] == stock_name()
    assert picture.read_bytes()[1:4] == b"PNG"


def test_a_time_that_is_over_and_other_mistakes(tmp_path: Path, said: Said) -> None:
    file = tmp_path / "bench.json"
    code, out, err = said(*LOOK, "--minutes", "1e-9", "--parts", "step", "--out", str(file))
    assert code == 0, err
    assert "step: left out, the time was over" in out and read(file)["parts"] == {}
    code, _, err = said("bench", "--device", "cpu", "--parts", "kernel", "--out", str(file))
    assert code == 2 and "quick=False and the file has True" in err
    code, _, err = said(*LOOK, "--parts", "kernel", "--plot", "x.png", "--batch", "0")
    assert code == 2 and "expected whole numbers" in err
    file.write_text("nothing")
    code, _, err = said(*LOOK, "--parts", "kernel", "--out", str(file))
    assert code == 2 and "wrote. Remove it, or choose another" in err


@pytest.mark.long
def test_all_of_it_at_a_glance(tmp_path: Path, said: Said) -> None:
    """Every part; several processes make more steps than one, and a stock step is comparable."""
    file = tmp_path / "bench.json"
    code, out, err = said(*LOOK, "--out", str(file))
    assert code == 0, err
    found = read(file)
    assert list(found["parts"]) == list(PARTS)
    step = found["parts"]["step"]["tables"][0]
    assert step["title"] == "training step, 0.2 M U-Net, digits, K = 2, joint, batch 16"
    ours, stock = step["lines"]
    assert stock["name"] == f"{stock_name()}, eager" and 0.1 < stock["ratio"] < 10
    assert ours["flops"] == pytest.approx(stock["flops"], rel=0.05)
    processes = found["parts"]["scaling"]["tables"][0]["lines"]
    assert [line["name"] for line in processes] == ["1 process", "2 processes"]
    solvers = found["parts"]["sampling"]["tables"][0]["lines"]
    assert len(solvers) == 7 and all(line["items"] == 8 for line in solvers)
    names = [line["name"] for line in found["parts"]["learned"]["tables"][0]["lines"]]
    assert names == ["fixed, K = 1", "fixed, K = 2", "learned, K = 2"]
    assert "left out" not in out
