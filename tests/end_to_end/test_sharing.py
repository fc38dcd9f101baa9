"""Models as folders: saved here, loaded elsewhere, damaged, interrupted, and read by people."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import ornstein
from ornstein import (
    Continuous,
    Counted,
    Diffusion,
    Discrete,
    FixedTime,
    FromRate,
    Linear,
    Monotone,
    NoiseLevel,
    ScoreModel,
    Tweedie,
)
from ornstein.networks import MLP, UNet
from ornstein.parts import described, rebuilt
from ornstein.sharing import numbers_of, read
from tests.conformance.zoo import TURN, TWO_NOISES
from tests.test_errors import message, says

ROOT = Path(__file__).resolve().parents[2]
FILES = ["README.md", "config.json", "model.safetensors"]
CHANNELS = torch.tensor([0.1, -0.2])[:, None, None]


class Tied(nn.Module):
    """A network of the user's own, with one weight in two places and a view of another."""

    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(size, size), nn.Linear(size, size)
        self.second.weight = self.first.weight
        both = torch.linspace(-1, 1, size + 2)
        self.register_buffer("early", both[:-2])
        self.register_buffer("late", both[2:])

    def forward(self, x: Tensor, logsnr: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x + self.early))) * self.late  # type: ignore[operator]


MODELS: dict[str, Callable[[], ScoreModel]] = {
    "channel": lambda: ScoreModel(
        UNet.tiny((2, 8, 8), features=2),
        ornstein.cld(),
        features="bins",
        data_mean=CHANNELS,
        data_std=1 + CHANNELS,
    ),
    "joint": lambda: ScoreModel(
        UNet.tiny(variables=3, dropout=0.2),
        ornstein.learned(2, full=True, learn_rates="separate", learn_v0_coupling=True),
        Discrete(16),
        parametrisation="joint",
        data_std=0.4,
    ),
    "vectors": lambda: ScoreModel(
        MLP((6,), width=16, depth=1), ornstein.vesde(), Continuous(), data_mean=0.3, data_std=2.0
    ),
    "logit": lambda: ScoreModel(
        MLP((6,), variables=2, features=1, width=16, depth=1),
        ornstein.learned(1, learn_rates="shared", learn_v0_variance=True),
        Tweedie(4, logit=0.05),
        parametrisation="joint",
        truncation=FixedTime(1e-3),
        features=[0.7],
    ),
    "plain": lambda: ScoreModel(
        MLP((6,), width=16, depth=1),
        ornstein.subvpsde(rate=Monotone(Linear(0.1, 9.0))),
        Discrete(4),
        truncation=NoiseLevel(0.02),
        precondition=False,
    ),
    "half": lambda: ScoreModel(
        MLP((6,), width=16, depth=1).bfloat16(), ornstein.alda(), Discrete(4), data_std=0.7
    ),
    "double": lambda: ScoreModel(
        MLP((6,), width=16, depth=1).double(),
        Diffusion(TURN, TWO_NOISES, rate_q=3.0, rate_d=Linear(0.1, 8.0)),
        Discrete(4),
    ),
}


def stirred(make: Callable[[], ScoreModel], seed: int = 3, size: float = 0.05) -> ScoreModel:
    """As if it had been trained, for networks start by adding nothing; the same every time."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = make()
        for parameter in model.parameters():
            parameter.add_(size * torch.randn(parameter.shape).to(parameter.dtype))
    return model.eval()


def made(name: str) -> ScoreModel:
    return stirred(MODELS[name])


def small(seed: int = 3) -> ScoreModel:
    """A model that is written quickly, with a rate that Q and D share."""
    return stirred(
        lambda: ScoreModel(MLP((6,), width=8, depth=1), ornstein.cld(), Discrete(4)), seed
    )


def data_for(model: ScoreModel) -> Tensor:
    shape = getattr(model.network, "layout").shape  # noqa: B009
    generator = torch.Generator().manual_seed(0)
    if model.likelihood.density:
        return torch.randn(3, *shape, generator=generator)
    levels = described(model.likelihood)["levels"]
    return torch.randint(levels, (3, *shape), generator=generator)


def figures_of(model: ScoreModel) -> list[Any]:
    """Numbers that depend on every part of the model, as text with all digits."""
    with torch.no_grad():
        bound = ornstein.elbo(
            model, data_for(model), draws=2, random=Counted(5, torch.arange(3)), control=False
        )
    parts = (bound.nats, bound.prior, bound.diffusion, bound.reconstruction)
    return [repr(part.tolist()) for part in parts]


def same_state(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(
        first[n].dtype == second[n].dtype and torch.equal(first[n], second[n]) for n in first
    )


# ------------------------------------------------------------------ elsewhere


CHILD = """
import json, sys
import ornstein, torch
torch.set_num_threads(1)
models = [ornstein.ScoreModel.from_pretrained(folder) for folder in sys.argv[1:]]
from tests.end_to_end.test_sharing import figures_of
for model in models:
    print(json.dumps(figures_of(model)))
"""


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The figures of every model, saved here and loaded by another process."""
    place = tmp_path_factory.mktemp("models")
    folders = [made(name).save_pretrained(place / name) for name in MODELS]
    paths = [str(Path(ornstein.__file__).resolve().parents[1]), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, folders)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=place,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return dict(zip(MODELS, lines, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_another_process_has_the_same_model(name: str, elsewhere: dict[str, list[str]]) -> None:
    """Bit for bit, the panels of a process that has learned included."""
    assert elsewhere[name] == figures_of(made(name))


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_saved_one(name: str, tmp_path: Path) -> None:
    model = made(name)
    folder = model.save_pretrained(tmp_path / "a" / "model")
    assert sorted(p.name for p in folder.iterdir()) == FILES
    torch.manual_seed(11)
    found = ScoreModel.from_pretrained(str(folder))
    after = torch.rand(3)
    torch.manual_seed(11)
    assert torch.equal(after, torch.rand(3))  # no draw was taken from the user's generator
    assert not found.training
    assert same_state(found, model)
    assert described(found) == described(model)
    assert found.truncation == model.truncation
    assert found.data_std == model.data_std
    assert all(v.dtype == torch.float64 for v in found.process.state_dict().values())
    strides = [p.stride() for p in model.network.parameters()]
    assert [p.stride() for p in found.network.parameters()] == strides


def test_a_model_is_built_from_its_description_alone() -> None:
    """As a run does that keeps its weights elsewhere."""
    model = made("joint")
    other = rebuilt(json.loads(json.dumps(described(model))), "the model", ScoreModel)
    other.load_state_dict(model.state_dict())
    other.process.follow(model.process.plan())
    assert figures_of(other.eval()) == figures_of(model)


def test_the_panels_of_a_learned_process_are_kept(tmp_path: Path) -> None:
    """They depend on its history, and the last digits of its kernels on them."""
    model = made("logit")
    grown, s = model.process, torch.tensor([0.3, 0.9], dtype=torch.float64)
    grown.follow(4 * grown.plan())
    found = ScoreModel.from_pretrained(model.save_pretrained(tmp_path / "m")).process
    assert torch.equal(found.plan(), grown.plan())
    assert torch.equal(found.transition(s).cholesky, grown.transition(s).cholesky)
    grown.replan()
    assert not torch.equal(found.plan(), grown.plan())


def test_a_device_and_a_default_device(tmp_path: Path) -> None:
    folder = small().save_pretrained(tmp_path / "m")
    with torch.device("meta"):
        found = ScoreModel.from_pretrained(folder)
    assert same_state(found, small())
    assert ScoreModel.from_pretrained(folder, device="cpu").process.device.type == "cpu"


def test_float16_weights_of_a_float32_network_with_float64_numbers(tmp_path: Path) -> None:
    """Types differ inside one network: each tensor keeps its own."""
    model = small()
    model.network.enter.half()  # type: ignore[union-attr, operator]
    model.network.leave.double()  # type: ignore[union-attr, operator]
    found = ScoreModel.from_pretrained(model.save_pretrained(tmp_path / "m"))
    assert same_state(found, model)


def test_a_compiled_network_is_saved_as_itself(tmp_path: Path) -> None:
    model = small()
    wrapped = small()
    wrapped.network = torch.compile(wrapped.network)  # type: ignore[assignment]
    folder = wrapped.save_pretrained(tmp_path / "m")
    assert same_state(ScoreModel.from_pretrained(folder), model)
    into = torch.compile(small(seed=8).network)
    loaded = ScoreModel.from_pretrained(folder, network=into)  # type: ignore[arg-type]
    assert numbers_of(loaded)[0].keys() == numbers_of(model)[0].keys()
    assert all(torch.equal(v, numbers_of(model)[0][n]) for n, v in numbers_of(loaded)[0].items())


# ------------------------------------------------------------------ tensors of two names


def test_one_tensor_of_two_names_is_stored_once(tmp_path: Path) -> None:
    model = small()
    state = model.state_dict()
    assert state["process.rate_q.pinned"].data_ptr() == state["process.rate_d.pinned"].data_ptr()
    folder = model.save_pretrained(tmp_path / "m")
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    assert set(state) - set(stored) == {"process.rate_d.pinned"}
    assert read(folder).tensors.keys() == state.keys()


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = stirred(lambda: ScoreModel(Tied(), ornstein.vpsde(), Discrete(4)))
    folder = model.save_pretrained(tmp_path / "m")
    found = ScoreModel.from_pretrained(folder, network=Tied())
    network: Any = found.network
    assert network.first.weight is network.second.weight
    assert same_state(found, model)
    x, logsnr = torch.randn(2, 6), torch.zeros(2)
    assert torch.equal(network(x, logsnr), model.network(x, logsnr))


def test_weights_that_are_not_equal_can_not_be_tied(tmp_path: Path) -> None:
    apart = Tied()
    apart.second.weight = nn.Parameter(2 * apart.first.weight.detach())
    model = ScoreModel(apart, ornstein.vpsde(), Discrete(4))
    folder = model.save_pretrained(tmp_path / "m")
    text = message(lambda: ScoreModel.from_pretrained(folder, network=Tied()))
    says(text, "second.weight", "first.weight", "one tensor", "model.safetensors")


# ------------------------------------------------------------------ code of one's own


def test_a_network_of_ones_own(tmp_path: Path) -> None:
    model = stirred(lambda: ScoreModel(Tied(), ornstein.cld(), Discrete(4)))
    folder = model.save_pretrained(tmp_path / "m")
    text = message(lambda: ScoreModel.from_pretrained(folder))
    says(text, "config.json", "network of this model was Tied", "network=network")
    assert same_state(ScoreModel.from_pretrained(folder, network=Tied()), model)
    text = message(lambda: ScoreModel.from_pretrained(folder, network=Tied(7)))
    says(text, "network.early has the shape (6,) there and (7,)", "5 more", "network=")


def test_a_function_as_a_network(tmp_path: Path) -> None:
    def halved(x: Tensor, logsnr: Tensor) -> Tensor:
        return x / 2

    folder = ScoreModel(halved, ornstein.cld()).save_pretrained(tmp_path / "m")  # type: ignore[arg-type]
    says(message(lambda: ScoreModel.from_pretrained(folder)), "halved", "network=network")
    found = ScoreModel.from_pretrained(folder, network=halved)  # type: ignore[arg-type]
    assert found.network is halved


def test_a_process_of_ones_own(tmp_path: Path) -> None:
    def process() -> Diffusion:
        return Diffusion(TURN, TWO_NOISES, rate=FromRate(lambda s: 1 + s), name="mine")

    model = stirred(lambda: ScoreModel(MLP((6,), width=8, depth=1), process(), Discrete(4)))
    folder = model.save_pretrained(tmp_path / "m")
    text = message(lambda: ScoreModel.from_pretrained(folder))
    says(text, "process of this model was Diffusion 'mine'", "process=process")
    found = ScoreModel.from_pretrained(folder, process=process())
    assert figures_of(found) == figures_of(model)


def test_a_likelihood_of_ones_own_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    class Mine(Discrete):
        pass

    model = ScoreModel(MLP((6,)), ornstein.cld(), Mine(4))
    says(message(lambda: model.save_pretrained(tmp_path / "m")), "Mine can't be described")
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_no_tensor_is_refused(tmp_path: Path) -> None:
    class Odd(Tied):
        def get_extra_state(self) -> Any:
            return {"step": 3}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = ScoreModel(Odd(), ornstein.cld(), Discrete(4))
    says(message(lambda: model.save_pretrained(tmp_path / "m")), "_extra_state", "dict", "tensors")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------ a process beside the file's


def test_the_same_process_may_be_given(tmp_path: Path) -> None:
    model = made("joint")
    folder = model.save_pretrained(tmp_path / "m")
    own = ornstein.learned(2, full=True, learn_rates="separate", learn_v0_coupling=True, seed=9)
    found = ScoreModel.from_pretrained(folder, process=own)
    assert found.process is own
    assert figures_of(found) == figures_of(model)


@pytest.mark.parametrize(
    "other, words",
    [
        (
            lambda: ornstein.cld(rate=Linear(0.1, 10.0)),
            ["end of process.rate_q is 10.0", "20.0 in"],
        ),
        (
            lambda: ornstein.cld(mass=1.0, v0_variance=0.01),
            ["process.S is [[1.0, 0.0], [0.0, 1.0]]", "[[1.0, 0.0], [0.0, 4.0]] in"],
        ),
        (lambda: ornstein.cld(v0_variance=0.02), ["process.auxiliary.root is [[0.1414"]),
        (ornstein.alda, ["process.S has the shape (2, 2) there and (3, 3)"]),
        (lambda: ornstein.learned(1), ["process.make_Q.raw is missing", "make_D.value is not"]),
        (lambda: ornstein.cld(rate=Monotone()), ["process.rate_q.logits is missing", "more such"]),
        (ornstein.vpsde, ["process.S has the shape"]),
    ],
    ids=["rate", "mass", "v0", "variables", "learned", "learned rate", "fewer"],
)
def test_another_process_is_refused(
    other: Callable[[], Any], words: list[str], tmp_path: Path
) -> None:
    folder = small().save_pretrained(tmp_path / "m")
    text = message(lambda: ScoreModel.from_pretrained(folder, process=other()))
    says(text, str(folder / "model.safetensors"), *words)


def test_a_process_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = small().save_pretrained(tmp_path / "m")
    says(message(lambda: ScoreModel.from_pretrained(folder, process="cld")), "ornstein.cld()")  # type: ignore[arg-type]


# ------------------------------------------------------------------ damaged


def edited(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config), encoding="utf-8")


def retensored(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Other weights, put there on purpose."""
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path)
    edited(folder, lambda config: config["weights"].pop("sha256"))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flipped(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no folder": (shutil.rmtree, ["there is no folder", "save_pretrained"]),
    "no config": (lambda f: (f / "config.json").unlink(), ["has no config.json"]),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ["and no model.safetensors"]),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), ["config.json can't be read"]),
    "not ours": (
        lambda f: (f / "config.json").write_text('{"model_type": "bert"}'),
        ["config.json is not about a model of this library"],
    ),
    "newer": (
        lambda f: edited(f, lambda c: c.update(format=2, version="9.1")),
        ["format 2 of ornstein 9.1", "format 1", "--upgrade"],
    ),
    "no model": (lambda f: edited(f, lambda c: c.pop("model")), ["describes no model"]),
    "unknown kind": (
        lambda f: edited(f, lambda c: c["model"]["network"].update(kind="mpl")),
        ["config.json", "'mpl'", "Perhaps you meant 'mlp'"],
    ),
    "unknown kind inside": (
        lambda f: edited(f, lambda c: c["model"]["process"]["rate"].update(kind="lineal")),
        ["config.json", "the rate", "'lineal'", "'linear'"],
    ),
    "a part is missing": (
        lambda f: edited(f, lambda c: c["model"].pop("likelihood")),
        ["config.json lacks 'likelihood'"],
    ),
    "a field is missing": (
        lambda f: edited(f, lambda c: c["model"]["process"].pop("S")),
        ["config.json lacks 'S'"],
    ),
    "a field too many": (
        lambda f: edited(f, lambda c: c["model"]["network"].update(wide=3)),
        ["config.json", "'mlp'", "wide"],
    ),
    "a wrong field": (
        lambda f: edited(f, lambda c: c["model"].update(parametrisation="both")),
        ["config.json", "parametrisation='both'"],
    ),
    "a likelihood as a truncation": (
        lambda f: edited(f, lambda c: c["model"].update(truncation={"kind": "continuous"})),
        ["config.json", "truncation=Continuous()"],
    ),
    "another number": (
        lambda f: edited(f, lambda c: c["model"]["process"]["rate"].update(end=10.0)),
        ["end of process.rate_q is 10.0 in the process and 20.0 in", "model.safetensors"],
    ),
    "another matrix": (
        lambda f: edited(f, lambda c: c["model"]["process"]["D"]["value"][1].__setitem__(1, 3.0)),
        ["process.make_D.value is [[0.0, 0.0], [0.0, 3.0]]", "[0.0, 1.0]] in"],
    ),
    "cut off": (cut, ["model.safetensors can't be read", "Copy the folder again"]),
    "one bit": (flipped, ["model.safetensors is not the file", "checksum", "'sha256'"]),
    "a tensor is missing": (
        lambda f: retensored(f, lambda t: t.pop("network.enter.bias")),
        ["model.safetensors does not fit", "network.enter.bias is missing"],
    ),
    "a tensor too many": (
        lambda f: retensored(f, lambda t: t.update(more=torch.zeros(2))),
        ["more is not known to the model"],
    ),
    "another shape": (
        lambda f: retensored(f, lambda t: t.update({"network.enter.bias": torch.zeros(2)})),
        ["network.enter.bias has the shape (2,) there and (8,) in the model"],
    ),
    "a twin is missing": (
        lambda f: retensored(f, lambda t: t.pop("process.rate_q.pinned")),
        ["has no tensor 'process.rate_q.pinned'"],
    ),
    "not a number": (
        lambda f: retensored(f, lambda t: t["moments.std"].fill_(float("nan"))),
        ["moments.std in", "NaN"],
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small().save_pretrained(tmp_path_factory.mktemp("saved") / "model")


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    damage, words = DAMAGE[name]
    damage(folder)
    says(message(lambda: ScoreModel.from_pretrained(folder)), str(folder), *words)


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "m").write_text("notes")
    says(message(lambda: small().save_pretrained(tmp_path / "m")), "is a file", "folder")
    says(message(lambda: ScoreModel.from_pretrained(tmp_path / "m")), "there is no folder")
    assert (tmp_path / "m").read_text() == "notes"


def test_weights_changed_on_purpose(tmp_path: Path) -> None:
    folder = small().save_pretrained(tmp_path / "m")
    retensored(folder, lambda t: t["network.enter.bias"].fill_(0.5))
    network: Any = ScoreModel.from_pretrained(folder).network
    assert torch.equal(network.enter.bias, torch.full((8,), 0.5))


# ------------------------------------------------------------------ interrupted


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A run's folder that holds a model and other things."""
    small(1).save_pretrained(tmp_path / "run")
    (tmp_path / "run" / "training.safetensors").write_bytes(b"more")
    return tmp_path / "run"


def which(folder: Path) -> int:
    """The seed of the model in a folder."""
    found = ScoreModel.from_pretrained(folder)
    return next(seed for seed in (1, 2, 3) if same_state(found, small(seed)))


def failing(patch: pytest.MonkeyPatch, number: int, killed: bool) -> None:
    """Every rename from this one on fails; a killed process does not tidy up either."""
    real, calls = os.replace, iter(range(1, 1000))

    def replace(source: Any, target: Any) -> None:
        if next(calls) >= number:
            full_disk()
        real(source, target)

    patch.setattr(os, "replace", replace)
    if killed:
        patch.setattr(Path, "unlink", lambda *_, **__: None)


@pytest.mark.parametrize("killed", [False, True], ids=["full", "killed"])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6])
def test_a_save_that_stops_leaves_a_whole_model(number: int, killed: bool, held: Path) -> None:
    """The fourth rename is the moment of change: before it the old model, after it the new."""
    with pytest.MonkeyPatch.context() as patch:
        failing(patch, number, killed)
        with pytest.raises(OSError, match="No space left"):
            small(2).save_pretrained(held)
    now = 1 if number <= 4 else 2
    assert which(held) == now
    whole = sorted([*FILES, "training.safetensors"])
    if now == 1 and not killed:
        assert sorted(p.name for p in held.iterdir()) == whole
    with pytest.MonkeyPatch.context() as patch:  # and again, over what is left of the last time
        patch.setattr(safetensors.torch, "save_file", full_disk)
        with pytest.raises(OSError, match="No space left"):
            small(3).save_pretrained(held)
    assert which(held) == now
    small(3).save_pretrained(held)
    assert which(held) == 3
    assert (held / "training.safetensors").read_bytes() == b"more"
    if not killed:
        assert sorted(p.name for p in held.iterdir()) == whole


@pytest.mark.parametrize("where", ["write_text", "replace", "save_file"])
def test_a_new_folder_is_whole_or_not_there(where: str, tmp_path: Path) -> None:
    owner = {"write_text": Path, "replace": os, "save_file": safetensors.torch}[where]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, where, full_disk)
        with pytest.raises(OSError, match="No space left"):
            small().save_pretrained(tmp_path / "m")
    assert not list(tmp_path.iterdir())
    small().save_pretrained(tmp_path / "m")
    assert which(tmp_path / "m") == 3


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    """As a checkpoint does, which is itself about to get its name."""
    small().save_pretrained(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == FILES


# ------------------------------------------------------------------ the card


FIGURES = {"bits_per_dim": 1.0512345678, "standard_error": 0.0101, "bound": "discrete", "draws": 8}


def page(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def run_lines(text: str, folder: Path, **names: Any) -> dict[str, Any]:
    """Run the Python lines of a card, with its folder's name."""
    (code,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    code = code.replace("path/to/this/folder", str(folder))
    if not hasattr(ornstein, "sample"):
        code = "\n".join(line for line in code.splitlines() if "ornstein.sample" not in line)
    exec(compile(code, "card", "exec"), names)
    return names


@pytest.mark.parametrize("name", ["logit", "channel"])
def test_the_lines_of_a_card_run(name: str, tmp_path: Path) -> None:
    model = made(name)
    folder = model.save_pretrained(tmp_path / "m")
    names = run_lines(page(folder), folder)
    assert same_state(names["model"], model)
    if "samples" in names:
        assert names["samples"].shape == (16, *data_for(model).shape[1:])


def test_the_lines_of_a_card_for_code_of_ones_own(tmp_path: Path) -> None:
    model = ScoreModel(Tied(), ornstein.vpsde(), Discrete(4))
    folder = model.save_pretrained(tmp_path / "m")
    text = page(folder)
    assert "`Tied`" in text
    assert "network=network" in text
    code = re.sub(r"^samples.*\n", "", text, flags=re.MULTILINE)  # of what shape, only a user knows
    assert same_state(run_lines(code, folder, network=Tied())["model"], model)


def test_a_card_says_what_the_model_is(tmp_path: Path) -> None:
    model = made("joint")
    folder = model.save_pretrained(
        tmp_path / "m",
        figures=FIGURES,
        data={"name": "digits", "shape": [1, 8, 8]},
        card="Made for a test.",
    )
    text = page(folder)
    front, rest = text.removeprefix("---\n").split("\n---\n", 1)
    assert "library_name: ornstein" in front
    assert "license: other" in front
    assert re.search(r"^tags:\n- ornstein\n- diffusion$", front, re.MULTILINE)
    count = sum(p.numel() for p in model.parameters())
    own = sum(p.numel() for p in model.process.parameters())
    for words in (
        "Made for a test.",
        "`learned-2-full`",
        f"{count:,}, {own} of them the process's",
        "joint",
        "| name | digits |",
        "| shape | (1, 8, 8) |",
        "| bits_per_dim | 1.05123 |",
        "| standard_error | 0.0101 |",
        "| bound | discrete |",
        "| draws | 8 |",
        f"| ornstein | {ornstein.__version__} |",
        f"| torch | {torch.__version__} |",
    ):
        assert words in rest, words
    for matrix in (model.process.Q, model.process.D):  # type: ignore[union-attr]
        assert f"{matrix[2, 0].item():.5g}" in rest
    assert str(tmp_path) not in text  # nobody else has this path
    assert read(folder).figures == FIGURES
    assert read(folder).data == {"name": "digits", "shape": [1, 8, 8]}
    assert read(folder).version == ornstein.__version__


def test_a_card_with_several_figures(tmp_path: Path) -> None:
    rows = [FIGURES, {"bits_per_dim": 2.5, "process": "a|b", "curve": {"bits": [1.0, 2.0]}}]
    folder = small().save_pretrained(tmp_path / "m", figures=rows)
    text = page(folder)
    assert "| bits_per_dim | standard_error | bound | draws | process |" in text
    assert "| 1.05123 | 0.0101 | discrete | 8 |  |" in text
    assert "| 2.5 |  |  |  | a\\|b |" in text
    assert "`config.json` has the rest" in text
    assert read(folder).figures == rows


def test_a_card_without_figures_says_so(tmp_path: Path) -> None:
    text = page(small().save_pretrained(tmp_path / "m"))
    assert "Nothing was measured" in text
    assert "bits" not in text.split("## Measured")[1]


def test_an_evaluation_goes_into_the_card(tmp_path: Path) -> None:
    model = small()
    result = ornstein.evaluate(model, data_for(model), quiet=True)
    folder = model.save_pretrained(tmp_path / "m", figures=result.to_dict())
    assert f"| bits_per_dim | {result.bits_per_dim:.6g} |" in page(folder)
    assert f"| truncation | {result.truncation} |" in page(folder)
    assert read(folder).figures["bits_per_dim"] == result.bits_per_dim


def test_figures_of_any_numbers(tmp_path: Path) -> None:
    given = {"a": torch.tensor(0.1, dtype=torch.float64), "b": float("nan"), "c": (1, Path("x"))}
    folder = small().save_pretrained(tmp_path / "m", figures=given)
    assert read(folder).figures == {"a": 0.1, "b": None, "c": [1, "x"]}
    text = message(lambda: small().save_pretrained(tmp_path / "n", figures={"a": [small]}))
    says(text, "figures['a'][0]", "function", "to_dict()")
    assert not (tmp_path / "n").exists()


# ------------------------------------------------------------------ the Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A stand-in for huggingface_hub that keeps its models in a folder."""
    place = tmp_path / "hub"
    stand_in: Any = types.ModuleType("huggingface_hub")

    def create_repo(repo_id: str, *, private: bool, exist_ok: bool) -> str:
        (place / repo_id).mkdir(parents=True, exist_ok=exist_ok)
        (place / f"{repo_id}.private").write_text(str(private))
        return f"https://hub/{repo_id}"

    def upload_folder(*, repo_id: str, folder_path: Path, commit_message: str) -> None:
        shutil.copytree(folder_path, place / repo_id, dirs_exist_ok=True)

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        assert sorted(allow_patterns) == FILES
        if not (place / repo_id).exists():
            raise FileNotFoundError(f"404 for {repo_id}")
        return str(place / repo_id)

    stand_in.create_repo, stand_in.upload_folder = create_repo, upload_folder
    stand_in.snapshot_download = snapshot_download
    monkeypatch.setitem(sys.modules, "huggingface_hub", stand_in)
    yield place


def test_to_the_hub_and_back(hub: Path) -> None:
    model = small()
    assert model.push_to_hub("someone/digits", figures=FIGURES) == "https://hub/someone/digits"
    assert sorted(p.name for p in (hub / "someone" / "digits").iterdir()) == FILES
    assert same_state(ScoreModel.from_pretrained("someone/digits"), model)
    text = page(hub / "someone" / "digits")
    assert 'from_pretrained("someone/digits")' in text
    assert same_state(run_lines(text, hub)["model"], model)
    assert (hub / "someone" / "digits.private").read_text() == "False"
    small(2).push_to_hub("someone/digits", private=True)
    assert same_state(ScoreModel.from_pretrained("someone/digits"), small(2))
    assert (hub / "someone" / "digits.private").read_text() == "True"


def test_a_folder_here_comes_first(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small(2).push_to_hub("someone/digits")
    monkeypatch.chdir(tmp_path)
    small(1).save_pretrained("someone/digits")
    assert which(Path("someone/digits")) == 1
    assert same_state(ScoreModel.from_pretrained("someone/digits"), small(1))


@pytest.mark.usefixtures("hub")
def test_a_name_that_the_hub_does_not_know() -> None:
    text = message(lambda: ScoreModel.from_pretrained("someone/nothing"))
    says(text, "there is no folder someone/nothing", "404 for someone/nothing", "'user/model'")


def test_without_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    text = message(lambda: ScoreModel.from_pretrained("someone/digits"))
    says(text, "there is no folder someone/digits", "ornstein[hub]")
    says(message(lambda: small().push_to_hub("someone/digits")), "ornstein[hub]")
    for name in ("runs/2024/digits", "./digits", "/someone/digits", "digits"):
        says(message(lambda name=name: ScoreModel.from_pretrained(name)), "there is no folder")
    says(message(lambda: ScoreModel.from_pretrained(Path("a/b"))), "there is no folder a/b")
