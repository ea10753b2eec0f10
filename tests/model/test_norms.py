"""Every norm of tokens against its equations in float64, written here once more and in another way."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpn_cli.arch import NORMS, Norm
from dpn_cli.errors import DpnError
from dpn_cli.model.norms import NormOptions, RunningNorm, Tokens, set_progress, token_norm
from dpn_cli.model.norms.dtn import DynamicTokenNorm
from dpn_cli.run.distributed import World
from support.ranks import run_distributed

EPS, WIDTH, GRID = 1e-3, 12, (3, 5)
TOKENS = Tokens(heads=4, grid=GRID)
RUNNING: tuple[Norm, ...] = ("bn", "sn", "powernorm", "un", "prepbn")
# Warm-ups that end within a test.
SHORT = NormOptions(power_warmup=2, un_warmup=2, prepbn_share=1.0)

Batch = tuple[Tensor, Tensor]
State = dict[str, Tensor]


def build(name: Norm, options: NormOptions = SHORT, tokens: Tokens = TOKENS) -> nn.Module:
    """A norm in float64 whose parameters are not those of the start."""
    norm = token_norm(name, WIDTH, eps=EPS, tokens=tokens, options=options).double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=g, dtype=parameter.dtype), alpha=0.3)
    set_progress(norm, 0.25)
    return norm


def tensors(norm: nn.Module) -> State:
    return {name: value.detach() for name, value in (*norm.named_parameters(), *norm.named_buffers())}


def batches(steps: int, rows: int = 4) -> list[Batch]:
    """Tokens with other moments in every feature and step, and the gradient of what a norm makes of them."""
    g = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def tokens(step: int) -> Tensor:
        return (normal(rows, 15, WIDTH) * (1 + step / 2) + normal(rows, 1, WIDTH)) * normal(WIDTH) + normal(WIDTH)

    return [(tokens(step), normal(rows, 15, WIDTH)) for step in range(steps)]


def step(norm: nn.Module, batch: Batch) -> tuple[Tensor, State]:
    """One forward and backward pass: the output, and the gradients of the input (``x``) and of the parameters."""
    x = batch[0].clone().requires_grad_()
    norm.zero_grad()
    y = norm(x)
    y.backward(batch[1])
    gradients = {name: parameter.grad for name, parameter in norm.named_parameters() if parameter.grad is not None}
    assert x.grad is not None
    return y.detach(), {"x": x.grad, **{name: value.clone() for name, value in gradients.items()}}


def standard(x: Tensor, dims: int | tuple[int, ...]) -> Tensor:
    mean = x.mean(dims, keepdim=True)
    return (x - mean) / torch.sqrt((x * x).mean(dims, keepdim=True) - mean * mean + EPS)


def bn(x: Tensor, w: State) -> Tensor:
    return standard(x, (0, 1)) * w["weight"] + w["bias"]


def gn(x: Tensor, w: State) -> Tensor:
    heads = [standard(head, (1, 2)) for head in torch.split(x, 3, -1)]
    return torch.cat(heads, -1) * w["weight"] + w["bias"]


def sn(x: Tensor, w: State) -> Tensor:
    mean, variance = torch.zeros_like(x), torch.zeros_like(x)
    for k, dims in enumerate(((1,), (2,), (0, 1))):
        own = x.mean(dims, keepdim=True)
        mean = mean + torch.exp(w["mean_weight"])[k] / torch.exp(w["mean_weight"]).sum() * own
        weight = torch.exp(w["var_weight"])[k] / torch.exp(w["var_weight"]).sum()
        variance = variance + weight * ((x - own) ** 2).mean(dims, keepdim=True)
    return (x - mean) / torch.sqrt(variance + EPS) * w["weight"] + w["bias"]


def prepbn(x: Tensor, w: State) -> Tensor:
    ln = standard(x, 2) * w["ln.weight"] + w["ln.bias"]
    return 0.75 * ln + 0.25 * (bn(x, w) + w["eta"] * x)


def attention(weight: Tensor, grid: tuple[int, int]) -> Tensor:
    """P (h, t, t) from the whole of R, whose rows are those of the released code: offsets to i, from j."""
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    dy, dx = y[:, None] - y, x[:, None] - x
    offsets = torch.from_numpy(np.stack([dx, dy, dx**2 + dy**2], -1)).double()
    scores = torch.einsum("ijk,hk->hij", offsets, weight).exp()
    return scores / scores.sum(-1, keepdim=True)


def dtn(
    x: Tensor,
    w: State,
    released: bool = False,
    variance_only: bool = False,
    grid: tuple[int, int] = GRID,
    pool: int = 1,
) -> Tensor:
    heads, out = [], []
    for head in torch.split(x, 3, -1):
        heads.append(head / torch.sqrt((head**2).mean(-1, keepdim=True) + EPS) if released else head)
    x = torch.cat(heads, -1)
    mean_ln = x.mean(-1, keepdim=True)
    var_ln = ((x - mean_ln) ** 2).sum(-1, keepdim=True) / (WIDTH - 1 if released else WIDTH)
    small = grid[0] // pool, grid[1] // pool
    matrices = attention(w["pos_proj.weight"], small)
    cell = torch.tensor([(t // grid[1]) // pool * small[1] + (t % grid[1]) // pool for t in range(x.shape[1])])
    for h, head in enumerate(heads):
        pooled = torch.stack([head[:, cell == place].mean(1) for place in range(small[0] * small[1])], 1)
        mean = torch.stack([matrices[h] @ image for image in pooled])[:, cell]
        second = torch.stack([matrices[h] @ image**2 for image in pooled])[:, cell]
        share = 1 / (1 + torch.exp(-w["var_norm_weight"][h]))
        variance = share * var_ln + (1 - share) * (second - mean**2)
        if "mean_norm_weight" in w:
            share = 1 / (1 + torch.exp(-w["mean_norm_weight"][h]))
        mixed = mean_ln if variance_only else share * mean_ln + (1 - share) * mean
        out.append((head - mixed) / torch.sqrt(variance + EPS))
    return torch.cat(out, -1) * w["weight"] + w["bias"]


EQUATIONS: dict[Norm, Callable[[Tensor, State], Tensor]] = {
    "ln": lambda x, w: standard(x, 2) * w["weight"] + w["bias"],
    "bn": bn,
    "in": lambda x, w: standard(x, 1) * w["weight"] + w["bias"],
    "gn": gn,
    "sn": sn,
    "scalenorm": lambda x, w: w["weight"] * x / torch.sqrt((x**2).sum(-1, keepdim=True)),
    "prepbn": prepbn,
    "rms": lambda x, w: x / torch.sqrt((x**2).mean(-1, keepdim=True) + EPS) * w["weight"],
    "dtn": dtn,
    "none": lambda x, w: x,
}


def agrees(norm: nn.Module, equation: Callable[[Tensor, State], Tensor], batch: Batch) -> None:
    weights = {name: value.detach().clone().requires_grad_() for name, value in norm.named_parameters()}
    x = batch[0].clone().requires_grad_()
    expected, inputs = equation(x, weights), {"x": x, **weights}
    y, gradients = step(norm, batch)
    torch.testing.assert_close(y, expected.detach(), rtol=1e-9, atol=1e-10)
    wanted = dict(zip(inputs, torch.autograd.grad(expected, list(inputs.values()), batch[1]), strict=True))
    torch.testing.assert_close(gradients, wanted, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", EQUATIONS)
def test_training_follows_the_equations(name: Norm) -> None:
    agrees(build(name), EQUATIONS[name], batches(1)[0])


def test_every_norm_is_tested() -> None:
    assert {*EQUATIONS, "powernorm", "un"} == set(NORMS)


@pytest.mark.parametrize(
    ("mode", "statistics"), [("released", "both"), ("released", "variance"), ("paper", "variance")]
)
def test_dtn_has_the_choices_of_the_released_code(mode: str, statistics: str) -> None:
    options = NormOptions(dtn=mode, dtn_statistics=statistics)  # type: ignore[arg-type]
    agrees(
        build("dtn", options),
        lambda x, w: dtn(x, w, released=mode == "released", variance_only=statistics == "variance"),
        batches(1)[0],
    )


def test_released_dtn_takes_its_neighbourhoods_from_cells_of_a_large_grid() -> None:
    norm = build("dtn", NormOptions(dtn="released"), Tokens(heads=4, grid=(28, 28)))
    g = torch.Generator().manual_seed(0)
    x, gradient = torch.randn((2, 2, 784, WIDTH), generator=g, dtype=torch.float64)
    agrees(norm, lambda x, w: dtn(x, w, released=True, grid=(28, 28), pool=2), (x, gradient))


def test_dtn_lies_between_layer_norm_and_instance_norm() -> None:
    norm, ((x, _),) = build("dtn"), batches(1)
    assert isinstance(norm, DynamicTokenNorm)
    with torch.no_grad():
        norm.var_norm_weight.fill_(50)
        ln = F.layer_norm(x, (WIDTH,), norm.weight, norm.bias, EPS)
        torch.testing.assert_close(norm(x), ln)
        norm.var_norm_weight.fill_(-50)
        norm.pos_proj.weight.zero_()
        instance = F.instance_norm(x.mT, None, None, norm.weight, norm.bias, eps=EPS).mT
        torch.testing.assert_close(norm(x), instance)


def test_dtn_starts_with_local_heads_and_the_rest_looks_everywhere() -> None:
    norm = token_norm("dtn", 30, eps=EPS, tokens=Tokens(heads=10, grid=(5, 5)))
    assert isinstance(norm, DynamicTokenNorm)
    centre = attention(norm.pos_proj.weight.detach().double(), (5, 5))[:, 12].view(10, 5, 5)
    peaks = [divmod(int(place), 5) for place in centre[:9].flatten(1).argmax(1)]
    assert set(peaks) == {(y, x) for y in (1, 2, 3) for x in (1, 2, 3)}
    torch.testing.assert_close(centre[9], torch.full((5, 5), 1 / 25, dtype=torch.float64))


def test_instance_norm_can_be_that_of_the_dtn_table() -> None:
    norm, ((x, _),) = build("in", NormOptions(in_unbiased=True)), batches(1)
    w = tensors(norm)
    expected = (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True) + EPS) * w["weight"] + w["bias"]
    torch.testing.assert_close(norm(x), expected)


def test_norms_that_torch_has_are_torchs() -> None:
    bn, gn, rms = (build(name) for name in ("bn", "gn", "rms"))
    theirs = nn.BatchNorm1d(WIDTH, EPS).double()
    group, root = nn.GroupNorm(4, WIDTH, EPS).double(), nn.RMSNorm(WIDTH, EPS).double()
    for own, other in ((bn, theirs), (gn, group), (rms, root)):
        other.load_state_dict({**other.state_dict(), **own.state_dict()})
    for x, _ in batches(3):
        torch.testing.assert_close(bn(x), theirs(x.flatten(0, 1)).view_as(x))
        torch.testing.assert_close(gn(x), group(x.mT).mT)
        torch.testing.assert_close(rms(x), root(x))
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(bn.state_dict()[name], theirs.state_dict()[name])
    x = batches(4)[3][0]
    torch.testing.assert_close(bn.eval()(x), theirs.eval()(x.flatten(0, 1)).view_as(x))


def test_running_statistics_of_switchable_and_progressive_norm() -> None:
    sn, rep = build("sn"), build("prepbn")
    mean, var, unbiased = np.zeros(WIDTH), np.ones(WIDTH), np.ones(WIDTH)
    for x, _ in batches(3):
        sn(x), rep(x)
        rows = x.flatten(0, 1).numpy()
        mean = 0.9 * mean + 0.1 * rows.mean(0)
        var, unbiased = 0.9 * var + 0.1 * rows.var(0), 0.9 * unbiased + 0.1 * rows.var(0, ddof=1)
    for norm, expected in ((sn, var), (rep, unbiased)):
        torch.testing.assert_close(norm.state_dict()["running_mean"], torch.from_numpy(mean))
        torch.testing.assert_close(norm.state_dict()["running_var"], torch.from_numpy(expected))
    x = batches(4)[3][0]
    w = tensors(rep)
    bn = (x - w["running_mean"]) / torch.sqrt(w["running_var"] + EPS) * w["weight"] + w["bias"]
    torch.testing.assert_close(rep.eval()(x), bn + w["eta"] * x)
    w = tensors(sn)
    means, variances = w["mean_weight"].softmax(0), w["var_weight"].softmax(0)
    centre = means[0] * x.mean(1, keepdim=True) + means[1] * x.mean(2, keepdim=True) + means[2] * w["running_mean"]
    var_in, var_ln = x.var(1, keepdim=True, correction=0), x.var(2, keepdim=True, correction=0)
    spread = variances[0] * var_in + variances[1] * var_ln + variances[2] * w["running_var"]
    torch.testing.assert_close(sn.eval()(x), (x - centre) / torch.sqrt(spread + EPS) * w["weight"] + w["bias"])


@pytest.mark.parametrize("grouped", [False, True])
def test_power_norm_follows_its_algorithm(grouped: bool) -> None:
    norm = build("powernorm", NormOptions(power_warmup=2, group_scale=grouped))
    weight, bias = tensors(norm)["weight"], tensors(norm)["bias"]
    phi, nu = torch.ones(WIDTH).double(), torch.zeros(WIDTH).double()
    for number, (x, gradient) in enumerate(batches(5), 1):
        x.requires_grad_()
        heads = torch.split(x, 3, -1)
        scaled = torch.cat([head / torch.sqrt((head**2).mean(-1, keepdim=True) + EPS) for head in heads], -1)
        inside = scaled if grouped else x * 1.0
        square = (inside.detach() ** 2).mean((0, 1))
        root = torch.sqrt((square if number <= 2 else phi) + EPS)
        z, g = inside.detach() / root, gradient * weight
        (of_x,) = torch.autograd.grad(inside, x, (g - nu * z) / root)
        y, gradients = step(norm, (x.detach(), gradient))
        torch.testing.assert_close(y, z * weight + bias)
        torch.testing.assert_close(gradients["x"], of_x)
        torch.testing.assert_close(gradients["weight"], (gradient * z).sum((0, 1)))
        torch.testing.assert_close(gradients["bias"], gradient.sum((0, 1)))
        nu = nu * (1 - 0.1 * (z**2).mean((0, 1))) + 0.1 * (g * z).mean((0, 1))
        phi = 0.9 * phi + 0.1 * square
        torch.testing.assert_close(norm.state_dict()["nu"], nu)
        torch.testing.assert_close(norm.state_dict()["running_var"], phi)
    expected = inside.detach() / torch.sqrt(phi + EPS) * weight + bias
    torch.testing.assert_close(norm.eval()(x.detach()), expected)


def test_unified_norm_follows_its_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten steps: warm-up to the fifth, the ratio from the eighth, and an outlier in the seventh."""
    monkeypatch.setattr("dpn_cli.model.norms.power.GAIN_START", 7)
    norm = build("un", NormOptions(un_warmup=6))
    weight, bias = tensors(norm)["weight"], tensors(norm)["bias"]
    running, psi = torch.ones(WIDTH).double(), torch.zeros(WIDTH).double()
    omega, kept = torch.zeros(4, WIDTH).double(), torch.zeros(4, WIDTH).double()
    outliers = []
    tokens = batches(1)[0][0]
    for number, (_, gradient) in enumerate(batches(10), 1):
        x = tokens * (10 if number == 7 else 1 + 0.1 * math.sin(number))
        square = (x**2).mean((0, 1))
        spread = omega.sqrt().var()
        omega[number % 4] = square
        arithmetic, geometric = omega.mean(0), omega.prod(0) ** 0.25
        outlier = number >= 6 and bool((arithmetic - geometric > 4 * spread).any())
        outliers.append(outlier)
        if outlier:
            omega[number % 4] = running
        own = number < 6 or outlier
        power = square if own else geometric
        ratio = torch.sqrt((power + EPS) / (running + EPS)).clamp(0.2, 5)
        if number <= 7 or outlier:
            ratio = torch.ones(WIDTH).double()
        running = 0.9 * running + 0.1 * power
        z, g = x / torch.sqrt(power + EPS), gradient * weight * ratio
        mean = (g * z).mean((0, 1))
        kept[number % 4] = psi if outlier else mean
        smoothed = mean if own else kept.mean(0)
        psi = 0.9 * psi + 0.1 * smoothed
        y, gradients = step(norm, (x, gradient))
        torch.testing.assert_close(y, z * weight + bias)
        torch.testing.assert_close(gradients["x"], (g - (smoothed if outlier else psi) * z) / torch.sqrt(power + EPS))
        torch.testing.assert_close(gradients["weight"], (gradient * z * ratio).sum((0, 1)))
        expected = {"running_var": running, "squares": omega, "projections": kept, "running_projection": psi}
        torch.testing.assert_close({key: tensors(norm)[key] for key in expected}, expected)
    assert outliers == [number == 7 for number in range(1, 11)]
    torch.testing.assert_close(norm.eval()(x), x / torch.sqrt(running + EPS) * weight + bias)


@pytest.mark.parametrize("name", RUNNING)
def test_a_restored_norm_continues_as_if_it_had_not_stopped(name: Norm) -> None:
    norm = build(name)
    for batch in batches(5):
        step(norm, batch)
    second = build(name)
    second.load_state_dict(norm.state_dict())
    for one in (norm, second, copy.deepcopy(norm)):
        assert isinstance(one, RunningNorm)
        result = step(one, batches(6)[5])
        state = {**result[1], "y": result[0], **one.state_dict()}
        if one is norm:
            first = state
        assert all(torch.equal(value, first[key]) for key, value in state.items())


@pytest.mark.parametrize("name", RUNNING)
def test_the_affine_map_is_the_norm_in_evaluation(name: Norm) -> None:
    norm = build(name).float()
    assert isinstance(norm, RunningNorm)
    for x, _ in batches(3):
        norm(x.float())
    norm.eval()
    affine = norm.affine()
    if name == "sn":
        assert affine is None
        return
    assert affine is not None
    assert all(part.dtype == torch.float64 for part in affine)
    x = batches(4)[3][0]
    torch.testing.assert_close(norm(x.float()), (x * affine[0] + affine[1]).float(), rtol=1e-5, atol=1e-5)
    assert build("powernorm", NormOptions(group_scale=True)).affine() is None  # type: ignore[operator]


@pytest.mark.parametrize("name", NORMS)
def test_statistics_stay_in_float32_under_autocast(name: Norm) -> None:
    norm = build(name).float()
    x = 30 + batches(1)[0][0].float()
    once = copy.deepcopy(norm)
    with torch.autocast("cpu", torch.bfloat16):
        low = norm(x)
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, once(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(norm.state_dict(), once.state_dict())
    if name != "rms":  # torch's warns
        with torch.autocast("cpu", torch.bfloat16):
            assert norm(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", NORMS)
def test_reset_fills_everything_that_a_checkpoint_fills(name: Norm) -> None:
    with torch.device("meta"):
        norm = token_norm(name, WIDTH, eps=EPS, tokens=TOKENS)
    norm.to_empty(device="cpu")
    for value in (*norm.parameters(), *norm.buffers()):
        nn.init.constant_(value, math.nan)
    fresh = token_norm(name, WIDTH, eps=EPS, tokens=TOKENS)
    assert all(value.is_floating_point() for value in fresh.state_dict().values())
    loaded = copy.deepcopy(norm)
    loaded.load_state_dict(fresh.state_dict())
    if name != "none":
        norm.reset_parameters()  # type: ignore[operator]
    x, _ = batches(1)[0]
    for other in (norm, loaded):
        torch.testing.assert_close(other.state_dict(), fresh.state_dict())
        torch.testing.assert_close(other.eval()(x.float()), fresh.eval()(x.float()))


def test_new_norms_start_as_others_do() -> None:
    (x, _), *_ = batches(1)
    fresh = {name: token_norm(name, WIDTH, eps=EPS).double() for name in NORMS if name != "dtn"}
    torch.testing.assert_close(fresh["scalenorm"](x), F.rms_norm(x, (WIDTH,), eps=0.0))
    torch.testing.assert_close(fresh["prepbn"].eval()(x), fresh["bn"].eval()(x) + x)
    torch.testing.assert_close(fresh["prepbn"].train()(x), fresh["ln"](x))


def test_evaluation_before_any_training_is_finite() -> None:
    for name in RUNNING:
        x = batches(1)[0][0].float()
        assert token_norm(name, WIDTH, eps=EPS).eval()(x).isfinite().all()


# A warning of torch's that it hides itself where warnings are no errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", ["bn", "sn", "prepbn", "dtn", "powernorm", "un"])
def test_compile_covers_the_norms(name: Norm) -> None:
    norm, compiled = build(name), build(name)
    compiled.compile(backend="aot_eager_decomp_partition", fullgraph=name in ("bn", "dtn"))
    for batch in batches(7):
        torch.testing.assert_close(step(compiled, batch), step(norm, batch))
    torch.testing.assert_close(compiled.state_dict(), norm.state_dict())


def ranks_job(world: World, folder: Path) -> None:
    rows = slice(world.rank * 2, world.rank * 2 + 2)
    done = {}
    for name in RUNNING:
        norm = build(name)
        for x, gradient in batches(7):
            # The gradient of a rank's own mean over its rows is twice that of the mean over all.
            y, gradients = step(norm, (x[rows], 2 * gradient[rows]))
        done[name] = {"y": y, **gradients, **{f"state.{key}": value for key, value in norm.state_dict().items()}}
    torch.save(done, folder / f"rank{world.rank}.pt")


def test_two_ranks_normalise_as_one(tmp_path: Path) -> None:
    run_distributed(ranks_job, tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    for name in RUNNING:
        norm, (zero, one) = build(name), (rank[name] for rank in ranks)
        for batch in batches(7):
            y, gradients = step(norm, batch)
        torch.testing.assert_close(torch.cat([zero["y"], one["y"]]), y)
        torch.testing.assert_close(torch.cat([zero["x"], one["x"]]) / 2, gradients.pop("x"))
        for key, value in gradients.items():  # which DDP averages
            torch.testing.assert_close((zero[key] + one[key]) / 2, value)
        for key, value in norm.state_dict().items():
            torch.testing.assert_close(zero[f"state.{key}"], value)
            torch.testing.assert_close(one[f"state.{key}"], value)


@pytest.mark.parametrize(
    ("name", "tokens", "options", "message"),
    [
        ("dtn", Tokens(heads=4), NormOptions(), "tokens must form a grid, but a class token is among them"),
        ("dtn", Tokens(heads=5, grid=GRID), NormOptions(), "5 heads do not divide the 12 features"),
        ("gn", Tokens(heads=5), NormOptions(), "5 heads do not divide the 12 features"),
        ("powernorm", Tokens(heads=5), NormOptions(group_scale=True), "5 heads do not divide the 12 features"),
        ("dtn", Tokens(4, (24, 24)), NormOptions(dtn="released"), "which 24x24 patches do not allow"),
    ],
)
def test_norms_that_such_tokens_cannot_have_are_refused(
    name: Norm, tokens: Tokens, options: NormOptions, message: str
) -> None:
    with pytest.raises(DpnError, match=message) as error:
        token_norm(name, WIDTH, eps=EPS, tokens=tokens, options=options)
    assert str(error.value).startswith(f"--norm {name}: ")
    assert "\n" not in str(error.value)
