"""The figures on docs/solvers.md, docs/way-back.md and in the README, from the JSON files.

Pages hold places `<!-- figures: NAME -->` … `<!-- end of figures -->`; `filled` renews them, each
by the function of its name, with every number that a sentence there says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import hypot
from typing import Any

from benchmarks.way_results import COUNTS, FEW, Figure, Results, sliced, ways

PLACE = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
LONG = 500
TITLES = {"vpsde": "VPSDE", "cld": "CLD", "learned-1": "learned"}
USUAL = ("ancestral", "exponential-1", "exponential-2", "exponential-3", "sde-2", "heun", "euler")
ALONE = ("exponential-1", "exponential-2", "heun", "ancestral")  # with the metric "relative", too
TIMED = ("ancestral", "exponential-1", "exponential-2", "exponential-3", "sde-2", "heun")


# ---------------------------------------------------------------- docs/solvers.md


def answer(results: Results) -> Iterable[str]:
    """The best solver for a number of evaluations."""
    table = []
    for count in COUNTS:
        rule = results.best("digits", "vpsde", count)
        known = [results.learned(name, count, "0") for name in ways(results)]
        own = min((f for f in known if f is not None), key=lambda f: f.value, default=None)
        cells = ["not learned", ""] if own is None else [f"`{own.solver}`", str(own)]
        table.append([str(count), f"`{rule.solver}`", str(rule), *cells])
    head = ["network evaluations", "best on its default grid", "", "best on learned times", ""]
    yield from tabled(head, table)
    yield ""
    yield (
        f"Fréchet distance of {results.digits['samples']:,} samples to the training digits, "
        f"VPSDE; less is better. {floor(results, 'digits')} Euler–Maruyama with {LONG} "
        f"evaluations comes to {results.ruled('digits', 'vpsde', 'euler', LONG)}. Each is the best "
        f"of {len(results.solvers('digits'))} solvers ({len(ways(results))} on learned times); a "
        "difference within the errors means nothing. With 5 evaluations on learned times the "
        "sliced Wasserstein distance, which sees blur, is smallest for "
        f"`{sliced(results, 5)[0][1]}`."
    )


def vpsde(results: Results) -> Iterable[str]:
    """All solvers."""
    yield from by_count(results, "digits", "vpsde", results.solvers("digits"), COUNTS)
    yield ""
    yield origin(results.digits, "digits")


def others(results: Results) -> Iterable[str]:
    """The same network under other processes."""
    for process in ("cld", "learned-1"):
        yield f"{TITLES[process]}:"
        yield ""
        yield from by_count(results, "digits", process, USUAL, COUNTS)
        yield ""
    ends = (
        f"{TITLES[name]} {results.ruled('digits', name, 'euler', LONG)}"
        for name in ("vpsde", "cld", "learned-1")
    )
    yield f"Euler–Maruyama with {LONG} evaluations: {', '.join(ends)}."


def mnist(results: Results) -> Iterable[str]:
    """A larger data set, on another grid."""
    counts = COUNTS[1:]
    for process in ("vpsde", "cld"):
        yield f"{TITLES[process]}:"
        yield ""
        yield from by_count(results, "mnist", process, results.solvers("mnist"), counts)
        yield ""
    ends = (
        f"{TITLES[name]} {results.ruled('mnist', name, 'euler', LONG)}" for name in ("vpsde", "cld")
    )
    yield (
        f"Euler–Maruyama with {LONG} evaluations: {', '.join(ends)}. {floor(results, 'mnist')} "
        f"{results.mnist['samples']:,} samples."
    )
    yield ""
    yield origin(results.mnist, "mnist")


# ---------------------------------------------------------------- docs/way-back.md


def gaussian(results: Results) -> Iterable[str]:
    """Errors in closed form, before and after."""
    table = []
    better = total = 0
    for solver in ways(results):
        cells = [f"`{solver}`"]
        for count in FEW:
            first, last = (results.error(solver, count, way) for way in ("preset", "0"))
            better, total = better + (last < first), total + 1
            cells.append(f"{digits(first)} → {digits(last)}")
        table.append(cells)
    yield from tabled(["solver", *(f"{count} evaluations" for count in FEW)], table)
    yield ""
    yield (
        'The error "path" on the spectrum of the digits: the best preset on its best rule → the '
        f"times learned for one variable. It is smaller in {better} of {total} cases. "
        + gained(results)
    )
    yield ""
    yield origin(results.wayback, "wayback")


def gained(results: Results) -> str:
    """What auxiliary variables add, in sentences."""
    parts: dict[str, list[float]] = {}
    for solver in ways(results):
        for count in FEW:
            rows = [results.row(solver, count, way) for way in ("1", "2")]
            known = [row["error"] for row in rows if row is not None]
            if known:
                part = 1 - min(known) / results.error(solver, count, "0")
                parts.setdefault(solver, []).append(part)
    most = {solver: max(found) for solver, found in parts.items()}
    little = [solver for solver in most if most[solver] < 0.05]
    much = [f"{most[s]:.0%} for `{s}`" for s in most if s not in little]
    return (
        f"One or two auxiliary variables take off at most {max(most[s] for s in little):.1%} more "
        f"for {listed(f'`{s}`' for s in little)}, and up to {listed(much)}."
    )


def before(results: Results, solver: str, count: int) -> Figure:
    """Samples without learning: the better of VPSDE's default grid and the best preset's rule."""
    known = (
        results.ruled("digits", "vpsde", solver, count),
        results.learned(solver, count, "preset"),
    )
    return min((f for f in known if f is not None), key=lambda f: f.value)


def samples(results: Results) -> Iterable[str]:
    """Samples of the trained digits on learned times."""
    table, worse, clear = [], [], 0
    for solver in ways(results):
        cells = [f"`{solver}`"]
        for count in FEW:
            first, last = before(results, solver, count), results.sampled(solver, count, "0")
            gap, errors = last.value - first.value, hypot(first.error, last.error)
            cells += [str(first), bold(str(last), gap < 0)]
            clear += gap < -2 * errors
            if gap >= 0:
                worse.append((f"`{solver}` at {count} (+{gap:.2f})", gap < errors))
        table.append(cells)
    yield from tabled(["solver", *(f"{n}, {w}" for n in FEW for w in ("rule", "learned"))], table)
    yield ""
    total = len(table) * len(FEW)
    yield (
        f"Fréchet distance of {results.wayback['samples']['digits']:,} digits, within 5, 10 and 20 "
        "evaluations. *Rule* is the better of two that are not learned: VPSDE on the solver's "
        "default grid, and the best preset on its best rule by the closed form. Learned times are "
        f"better (bold) in {total - len(worse)} of {total} cases, in {clear} of them by more than "
        f"two standard errors. Left is {listed(name for name, _ in worse)}"
        + (", within a standard error. " if all(near for _, near in worse) else ". ")
        + wider(results)
    )
    yield ""
    apart = sliced(results, 5)
    held = results.digits["against"]["floor"]["sliced_wasserstein"]
    yield (
        "The sliced Wasserstein distance of pixels, which sees blur, orders learned times with 5 "
        f"evaluations otherwise: {', '.join(f'`{s}` {v:.3f}' for v, s in apart)}. New data is at "
        f"{held:.3f}."
    )


def wider(results: Results) -> str:
    """Samples with auxiliary variables, learned by the same error, in a sentence."""
    nearer = total = 0
    for solver in ways(results):
        for count in FEW:
            for way in ("1", "2"):
                if (found := results.learned(solver, count, way)) is not None:
                    nearer += found.value < results.sampled(solver, count, "0").value
                    total += 1
    return (
        "Processes with one or two auxiliary variables, learned by the same error, have nearer "
        f"samples than the learned times alone in {nearer} of {total} cases."
    )


def alone(results: Results) -> Iterable[str]:
    """The law of the samples alone as the aim."""
    table = []
    nearer = total = 0
    for solver in ALONE:
        for count in FEW:
            errors = [digits(results.error(solver, count, way, "relative")) for way in "02"]
            plain, wide = (results.sampled(solver, count, way, "relative") for way in "02")
            path = results.sampled(solver, count, "0")
            nearer, total = nearer + (wide.value < path.value), total + 1
            table.append([f"`{solver}`", str(count), *errors, str(plain), str(wide), str(path)])
    head = ["solver", "evaluations", "error, K = 1", "error, K = 3"]
    yield from tabled([*head, "samples, K = 1", "samples, K = 3", 'times by "path"'], table)
    yield ""
    first, last = (results.error("exponential-1", 10, way, "relative") for way in "02")
    yield (
        f'The error "relative" on the digits\' spectrum, and the Fréchet distance of samples. Two '
        f"auxiliary variables bring a first-order step with 10 evaluations from {digits(first)} to "
        f"{digits(last)} in closed form. Yet the samples are nearer to the digits than those on "
        f'times by "path" in only {nearer} of {total} cases.'
    )
    yield ""
    rows = [r for r in results.wayback["rows"] if r["spectrum"] not in ("digits", "mnist")]
    spectrum = rows[0]["spectrum"]
    cells = []
    for count in FEW:
        found = [
            results.error("exponential-1", count, way, "relative", spectrum)
            for way in ("preset", "0", "1", "2")
        ]
        cells.append([str(count), *map(digits, found)])
    yield (
        f"The same for `exponential-1` and Gaussian data with 24 {spectrum}, without samples; the "
        f"search was stopped after {results.wayback['iterations']} iterations from each start, and "
        "a larger process is not always a better one by then:"
    )
    yield ""
    yield from tabled(["evaluations", "best preset", "K = 1", "K = 2", "K = 3"], cells)


def fixed(results: Results) -> Iterable[str]:
    """Times for CLD as it is."""
    table = []
    for solver in TIMED:
        cells = [f"`{solver}`"]
        for count in FEW:
            first = results.ruled("digits", "cld", solver, count)
            last = results.learned(solver, count, "times:cld")
            cells += [str(first), str(last)]
        table.append(cells)
    head = ["solver", *(f"{n}, {w}" for n in FEW for w in ("default", "learned"))]
    yield from tabled(head, table)
    yield ""
    yield (
        "Fréchet distance of digits under CLD, on the default grid and on times learned for it. "
        "Learned times for VPSDE give, within 10 and 20 evaluations, "
        + ", ".join(
            f"`{solver}` {results.learned(solver, 10, '0')} and {results.learned(solver, 20, '0')}"
            for solver in ("exponential-2", "sde-2", "heun")
        )
        + "."
    )


def large(results: Results) -> Iterable[str]:
    """Times for a model of MNIST."""
    table = []
    for process in ("vpsde", "cld"):
        for solver in TIMED:
            cells = [TITLES[process], f"`{solver}`"]
            for count in FEW[1:]:
                first = results.ruled("mnist", process, solver, count)
                last = results.learned(solver, count, f"times:{process}", spectrum="mnist")
                cells += [str(first), str(last)]
            table.append(cells)
    head = ["process", "solver", *(f"{n}, {w}" for n in FEW[1:] for w in ("rule", "learned"))]
    yield from tabled(head, table)
    yield ""
    yield (
        f"Fréchet distance of {results.wayback['samples']['mnist']:,} samples of MNIST, on the "
        "default grid and on learned times."
    )


def long(results: Results) -> Iterable[str]:
    """A few evaluations against many."""
    table = []
    for data, processes in (("digits", ("vpsde", "cld", "learned-1")), ("mnist", ("vpsde", "cld"))):
        for process in processes:
            few, many = results.shortest(process, data), results.ruled(data, process, "euler", LONG)
            how = f"`{few.solver}`, {few.evaluations}"
            title = {"digits": "digits", "mnist": "MNIST"}[data]
            held = results.compared(data)["against"]["floor"]
            least = Figure(held["frechet"], held["frechet_error"], "", 0)
            table.append([title, TITLES[process], how, str(few), str(many), str(least)])
    head = ["data", "process", "best within 20", "", f"Euler–Maruyama, {LONG}", "new data"]
    yield from tabled(head, table)
    yield ""
    yield (
        "Fréchet distances. The best is taken of all solvers, on rules and on learned times; of so "
        "many figures the smallest is a little too small. *Learned* is a process of one auxiliary "
        "variable that was learned with a joint model, as in the paper."
    )


# ---------------------------------------------------------------- README.md


def readme(results: Results) -> Iterable[str]:
    """What is said in two sentences."""
    few, many = results.shortest("vpsde"), results.ruled("digits", "vpsde", "euler", LONG)
    first = results.ruled("mnist", "vpsde", "exponential-2", 20)
    last = results.learned("exponential-2", 20, "times:vpsde", spectrum="mnist")
    yield (
        f"On the embedded digits {few.evaluations} network evaluations (`{few.solver}`, learned "
        f"times) give samples with a Fréchet distance of {few} to the data, where Euler–Maruyama "
        f"has {many} with {LONG}. On MNIST that is not reached: `exponential-2` with 20 gets from "
        f"{first} (the default grid) to {last}, and Euler–Maruyama with {LONG} has "
        f"{results.ruled('mnist', 'vpsde', 'euler', LONG)}."
    )


# ---------------------------------------------------------------- small tools


def by_count(
    results: Results, data: str, process: str, solvers: Iterable[str], counts: Iterable[int]
) -> Iterable[str]:
    """Solvers against evaluations, the best of each column bold."""
    counts = tuple(counts)
    best = {count: results.best(data, process, count) for count in counts}
    table = []
    for solver in solvers:
        cells = [f"`{solver}`"]
        for count in counts:
            found = results.ruled(data, process, solver, count)
            cells.append("—" if found is None else bold(str(found), found == best[count]))
        table.append(cells)
    yield from tabled(["solver", *map(str, counts)], table)


def tabled(head: list[str], table: Iterable[list[str]]) -> Iterable[str]:
    for cells in (head, ["---"] * len(head), *table):
        yield f"| {' | '.join(cells)} |"


def bold(text: str, really: bool) -> str:
    return f"**{text}**" if really else text


def digits(error: float) -> str:
    return f"{error:#.3g}" if error < 10 else f"{error:.0f}"


def listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def floor(results: Results, data: str) -> str:
    """What new data comes to."""
    against = results.compared(data)["against"]
    held = Figure(against["floor"]["frechet"], against["floor"]["frechet_error"], "", 0)
    few = against["floor_samples"] < results.compared(data)["samples"]
    return (
        f"New data, {against['floor_samples']:,} examples of {against['floor_split']}, is at "
        f"{held}" + (" (fewer, so that it looks worse than it is)." if few else ".")
    )


def origin(record: dict[str, Any], what: str) -> str:
    """How it was made."""
    command = "wayback" if what == "wayback" else f"solvers {what}"
    p = record["provenance"]
    return (
        f"(`python -m benchmarks.{command}`; PyTorch {p['torch']}, {p['date']}, commit "
        f"{p['commit']})"
    )


FIGURES: dict[str, Callable[[Results], Iterable[str]]] = {
    "answer": answer,
    "vpsde": vpsde,
    "others": others,
    "mnist": mnist,
    "gaussian": gaussian,
    "samples": samples,
    "alone": alone,
    "fixed": fixed,
    "large": large,
    "long": long,
    "readme": readme,
}


def filled(text: str, results: Results) -> str:
    """A page with its figures renewed; places of other names stay as they are."""

    def renew(found: re.Match[str]) -> str:
        if found[2] not in FIGURES:
            return found[0]
        lines = "".join(f"{line}\n" for line in FIGURES[found[2]](results))
        return found[1] + lines + found[3]

    return PLACE.sub(renew, text)
