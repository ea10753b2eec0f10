"""How fast `benchmarks/gpu.py` finds trainings, encoding and sliding windows, beside the machine's peak and peers.

The peak is the measured rate of a matrix product in the precision of the training. Seconds of a step are the difference
of a long and a short run, each ended by a synchronisation: a GPU works while the loop goes on, and what a run begins
with does not count.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache, partial
from importlib import import_module

import torch
from gpu_report import NotHereError, Settings, Speed
from step import CLASSES, Steps, bare_steps, fit_steps, synthetic, timms

from dpn_cli.arch import SIZES, Stem, parse_arch
from dpn_cli.config.cost import Cost, total_hours
from dpn_cli.config.schema import Runtime
from dpn_cli.engine.fit import Batch, prepare
from dpn_cli.engine.memory import is_out_of_memory
from dpn_cli.engine.planning import matrix_rate
from dpn_cli.errors import OutOfMemoryError
from dpn_cli.model.flops import count_macs, training_flops
from dpn_cli.run.distributed import World
from dpn_cli.run.precision import autocast, choose_precision
from dpn_cli.weights.backbone import Backbone, load_backbone

RUNTIME = Runtime(precision="auto")
COMPILED = Runtime(precision="auto", compile=True)
# Shares of the peak that trainings of these networks, and of segmentation, are to reach on a GPU.
BARS = {"B/16": 0.5, "L/16": 0.5}
SEGMENT_BAR = 0.45
# The image that is segmented by sliding windows, in windows: one high, four wide.
WIDE = 4
# Steps before those that count, and that count at least.
FEW, LEAST = 2, 3


@cache
def peak(device: torch.device) -> float:
    """Return the FLOPs per second of a matrix product in the precision of the trainings."""
    return matrix_rate(device, "bf16")


def elapsed(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, with all that it has begun on a GPU."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def step_seconds(kinds: Mapping[str, Steps], settings: Settings) -> dict[str, float]:
    """Return the seconds of a step of each kind: medians over rounds in turns, after one that warms up."""
    device, counts = settings.device, dict[str, int]()
    for name, run in kinds.items():
        run(FEW)
        guess = elapsed(partial(run, FEW), device) / FEW
        counts[name] = max(LEAST, min(settings.steps, int(settings.seconds / guess)))
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(settings.rounds):
        for name, run in kinds.items():
            short = elapsed(partial(run, FEW), device)
            long = elapsed(partial(run, FEW + counts[name]), device)
            steps = counts[name]
            # A machine that does other things may take longer for the short run.
            found[name].append((long - short) / steps if long > short else long / (FEW + steps))
    return {name: statistics.median(values) for name, values in found.items()}


Kinds = Mapping[str, Callable[[int], Steps]]
"""What makes a kind of steps with so many rows at once, by name."""


def best_rows(sizes: Iterable[int], kinds: Kinds, settings: Settings) -> tuple[int, str]:
    """Return the micro-batch with which a step of the first kind does most images per second, and all rates as text."""
    rates: dict[int, float] = {}
    name, kind = next(iter(kinds.items()))
    quick = Settings(settings.device, steps=LEAST, seconds=0.5, rounds=1)
    for rows in sizes:
        try:
            rates[rows] = rows / step_seconds({name: kind(rows)}, quick)[name]
        except (RuntimeError, MemoryError, OutOfMemoryError) as error:
            if not ran_out(error) or not rates:
                raise
            break
        finally:
            release(settings.device)
    best = max(rates, key=lambda rows: rates[rows])
    return best, "per second by micro-batch: " + ", ".join(f"{rows} {rate:.4g}" for rows, rate in rates.items())


def rates_of(rows: int, kinds: Kinds, settings: Settings) -> tuple[int, dict[str, float]]:
    """Return images per second of each kind, with half the rows where not all kinds have the memory, and those rows."""
    while True:
        try:
            made = {name: kind(rows) for name, kind in kinds.items()}
            return rows, {name: rows / seconds for name, seconds in step_seconds(made, settings).items()}
        except (RuntimeError, MemoryError, OutOfMemoryError) as error:
            if not ran_out(error) or rows == 1:
                raise
        rows //= 2  # outside the handler, which holds the tensors of the failed step
        release(settings.device)


def ran_out(error: BaseException) -> bool:
    """Return whether memory ran out, in a loop of ours or in another."""
    return isinstance(error, OutOfMemoryError) or is_out_of_memory(error)


def release(device: torch.device) -> None:
    """Give back the memory of what is not used any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def classifier(arch: str, side: int, stem: Stem, device: torch.device) -> Backbone:
    """Return a classifier from scratch."""
    return load_backbone(arch, stem=stem, image_size=side, num_classes=CLASSES).to(device)


class Best:
    """The micro-batches that were found best, and the rates with them, for the rows with --compile."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[int, float]] = {}

    def of(self, what: str) -> tuple[int, float]:
        """Return those of a network. Raises `NotHereError` where it was not measured."""
        if what not in self.found:
            raise NotHereError(f"{what} was not measured without --compile")
        return self.found[what]


def training(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure the training of classifiers at their best micro-batch, beside timm's own ViT in a bare loop."""
    for arch, side in settings.trained:
        yield from training_of(arch, side, settings, best)
        release(settings.device)


def training_of(arch: str, side: int, settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure one network with both stems."""
    device = settings.device
    models: dict[Stem, Backbone] = {stem: classifier(arch, side, stem, device) for stem in ("dpn", "none")}
    stock = timms(arch, side, CLASSES).to(device)

    @lru_cache(1)
    def batch(rows: int) -> Batch:
        return synthetic(rows, device, side)

    kinds: Kinds = {
        "dpn": lambda rows: fit_steps(models["dpn"], batch(rows), RUNTIME, device),
        "none": lambda rows: fit_steps(models["none"], batch(rows), RUNTIME, device),
        "timm": lambda rows: bare_steps(stock, batch(rows), RUNTIME, device),
    }
    rows, note = best_rows(settings.batches, kinds, settings)
    rows, rates = rates_of(rows, kinds, settings)
    best.found[f"{arch} at {side}"] = rows, rates["dpn"]
    for stem, peer, other in (("dpn", "the plain stem", "none"), ("none", "timm's ViT in a bare loop", "timm")):
        share = rates[stem] * training_flops(models[stem].config) / peak(device)
        what = f"training {arch} at {side}, stem {stem}"
        yield Speed(what, rates[stem], rows, share, BARS.get(arch), peer, rates[other], note)
        note = ""


def training_compiled(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure the same trainings with --compile beside those without it."""
    for arch, side in settings.trained:
        found = best.of(f"{arch} at {side}")
        model = classifier(arch, side, "dpn", settings.device)
        ready = prepare(model, COMPILED, World(0, 1, settings.device))
        run = fit_steps(ready, synthetic(found[0], settings.device, side), COMPILED, settings.device)
        what = f"training {arch} at {side}, stem dpn, --compile"
        yield compiled_row(what, run, found, training_flops(model.config), BARS.get(arch), settings)
        del model, ready, run
        release(settings.device)


def compiled_row(
    what: str, run: Steps, best: tuple[int, float], flops: float, bar: float | None, settings: Settings
) -> Speed:
    """Measure a training with --compile, and how long compiling takes and when that is paid back."""
    rows, before = best
    torch.compiler.reset()  # what was compiled for another network would be compiled again for any size
    compiling = elapsed(partial(run, FEW), settings.device)
    seconds = step_seconds({"": run}, settings)[""]
    release(settings.device)
    gained = rows / before - seconds
    after = f"paid back after {compiling / gained:,.0f} steps" if gained > 0 else "never paid back"
    share = flops * rows / seconds / peak(settings.device)
    note = f"compiling takes {compiling:.0f} s, {after}"
    return Speed(what, rows / seconds, rows, share, bar, "the same without --compile", before, note)


def segmentation(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure the training of segmentation beside timm's ViT in a bare loop, and mmsegmentation's model in one."""
    import segment

    (arch, crop), device = settings.segmented, settings.device
    plain = segment.network(arch, "none", crop=crop, device=device)
    ours, lacking = "ours", ""

    def noise(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = segment.synthetic(rows, crop, device)
        return plain.vit.normalize(batch["image"]), batch["label"]

    kinds: dict[str, Callable[[int], Steps]] = {
        ours: lambda rows: segment.our_steps(plain, segment.synthetic(rows, crop, device), RUNTIME, device),
        "timm's ViT in a bare loop": lambda rows: segment.bare_steps(arch, *noise(rows), RUNTIME, device),
    }
    try:
        import_module("mmseg")
    except ImportError as error:
        lacking = f"; mmsegmentation: {error.name} is not installed"
    else:
        other = segment.network(arch, "none", crop=crop, device=device)
        what = "mmsegmentation's model in a bare loop"
        kinds[what] = lambda rows: segment.mmseg_steps(other, arch, *noise(rows), RUNTIME)
    rows, note = best_rows(settings.crops, kinds, settings)
    rows, rates = rates_of(rows, kinds, settings)
    share = rates[ours] * training_flops(plain.vit.config) / peak(device)
    best.found[f"segmentation {arch}"] = rows, rates[ours]
    note += lacking
    what, bar = f"training segmentation {arch} at {crop}", None if settings.trial else SEGMENT_BAR
    for peer in (name for name in rates if name != ours):
        yield Speed(what, rates[ours], rows, share, bar, peer, rates[peer], note)
        note = ""


def segmentation_compiled(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure the training of segmentation with --compile."""
    import segment

    (arch, crop), device = settings.segmented, settings.device
    found = best.of(f"segmentation {arch}")
    plain = segment.network(arch, "none", crop=crop, device=device)
    run = segment.our_steps(plain, segment.synthetic(found[0], crop, device), COMPILED, device)
    what = f"training segmentation {arch} at {crop}, --compile"
    bar = None if settings.trial else SEGMENT_BAR
    yield compiled_row(what, run, found, training_flops(plain.vit.config), bar, settings)


def lit(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure a LiT step with cached features, with the tower in the loop, and open_clip's with a locked tower."""
    import lit as benchmark

    from tasks.lit.text_tower import TextTower

    (arch, size, side), rows, device = settings.towers, settings.pairs, settings.device
    world = World(0, 1, device)
    tower = load_backbone(arch, image_size=side).requires_grad_(False).to(device).eval()
    text = TextTower(SIZES[size], benchmark.VOCABULARY, benchmark.CONTEXT, tower.embed_dim, 10.0, None, 0).to(device)
    pairs = benchmark.step_kinds(tower, text, text, rows, world)
    seconds = step_seconds(pairs.steps, settings)
    rates = {name: rows / value for name, value in seconds.items()}
    flops = {"cached": pairs.learning, "in the loop": pairs.learning + pairs.looking}
    best.found["LiT"] = rows, rates["cached"]
    peer = "open_clip, locked"
    for name, work in flops.items():
        share = work / seconds[name] / peak(device)
        yield Speed(f"LiT {arch} and text {size}, pairs, {name}", rates[name], rows, share, None, peer, rates[peer])


def lit_compiled(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure a LiT step with cached features and a compiled text tower."""
    (arch, size, side), device = settings.towers, settings.device
    found, world = best.of("LiT"), World(0, 1, device)
    import lit as benchmark

    from tasks.lit.text_tower import TextTower

    tower = load_backbone(arch, image_size=side).requires_grad_(False).to(device).eval()
    text = TextTower(SIZES[size], benchmark.VOCABULARY, benchmark.CONTEXT, tower.embed_dim, 10.0, None, 0).to(device)
    pairs = benchmark.step_kinds(tower, text, prepare(text, COMPILED, world), found[0], world)
    what = f"LiT {arch} and text {size}, pairs, cached, --compile"
    yield compiled_row(what, pairs.steps["cached"], found, pairs.learning / found[0], None, settings)


def encoding(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure encoding images in memory, and JPEGs into the feature cache beside it."""
    from tasks.lit.features import encode_function

    (arch, _, side), device = settings.towers, settings.device
    world = World(0, 1, device)
    tower = load_backbone(arch, image_size=side).requires_grad_(False).to(device).eval()
    encode = encode_function(tower, device, autocast(RUNTIME, device, tower))
    flops = 2 * count_macs(tower.config).forward

    def steps_of(rows: int) -> Steps:
        images = torch.randint(256, (rows, 3, side, side), dtype=torch.uint8)

        def go(steps: int) -> list[float]:
            for _ in range(steps):
                encode(images).cpu()
            return []

        return go

    rows, note = best_rows(settings.batches, {"": steps_of}, settings)
    rows, rates = rates_of(rows, {"": steps_of}, settings)
    rate = rates[""]
    best.found["encoding"] = rows, rate
    yield Speed(f"encoding {arch} at {side}, images in memory", rate, rows, rate * flops / peak(device), note=note)
    from lit import BATCH, caching_seconds

    cached, bare, _ = caching_seconds(tower, settings.images, settings.rounds, world)
    peer, images = f"forward passes of {BATCH} images in memory", settings.images
    yield Speed(f"caching {arch}, JPEGs of 500 x 375", images / cached, BATCH, None, None, peer, images / bare)


def windows(settings: Settings, best: Best) -> Iterator[Speed]:
    """Measure sliding windows over a wide image beside mmsegmentation's over the same network."""
    import segment

    from tasks.segment.sliding_window import starts

    (arch, crop), device = settings.segmented, settings.device
    size = crop, WIDE * crop
    names, note = ["ours", "mmsegmentation"], ""
    try:
        runs = {name: segment.slide(name, arch, size, crop=crop, device=device) for name in names}
    except ImportError as error:
        runs, note = (
            {"ours": segment.slide("ours", arch, size, crop=crop, device=device)},
            f"{error.name} is not installed",
        )

    precision = choose_precision(RUNTIME, device.type, parse_arch(arch)[0].width)

    def several(run: Callable[[], torch.Tensor]) -> Steps:
        def go(steps: int) -> list[float]:
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, precision == "bf16"):
                for _ in range(steps):
                    run()
            return []

        return go

    seconds = step_seconds({name: several(run) for name, run in runs.items()}, settings)
    each = len(starts(size[1], crop, segment.stride_of(crop)))
    vit = segment.network(arch, crop=crop, device=device).vit
    share = 2 * each * count_macs(vit.config).forward / seconds["ours"] / peak(device)
    there = 1 / seconds["mmsegmentation"] if "mmsegmentation" in seconds else None
    what = f"sliding windows {arch}, images of {size[0]} x {size[1]}"
    yield Speed(what, 1 / seconds["ours"], 8, share, None, "mmsegmentation's inference", there, note)


def vtab(settings: Settings, best: Best) -> Iterator[Speed]:
    """Price VTAB-1k with B/32 from a measured step and measured scoring: all trainings, all test splits."""
    from dpn_cli.config.load import read_config
    from tasks.vtab.config import VtabConfig
    from tasks.vtab.dry_run import sweep_cost
    from tasks.vtab.tasks import TASKS

    config, device = VtabConfig.model_validate(read_config("vtab")), settings.device
    arch, side = settings.towers[0], settings.towers[2]
    rows = settings.batches[-1] if settings.trial else config.batch_size
    run = fit_steps(classifier(arch, side, "dpn", device), synthetic(rows, device, side), RUNTIME, device)
    seconds = step_seconds({"": run}, settings)[""]
    one = Cost(
        name=arch, memory=0, step_seconds=seconds * config.batch_size / rows, steps=config.schedule.steps, trainings=1,
        evaluation_seconds=1 / best.of("encoding")[1], kept=0, passing=0,
    )  # fmt: skip
    whole = sweep_cost(config, one, TASKS)
    hours = total_hours([whole])
    note = f"{whole.trainings} trainings of {config.schedule.steps} steps and the scoring: {hours:.2f} hours"
    yield Speed(f"VTAB-1k, {arch} at {side}, precision {RUNTIME.precision}", rows / seconds, rows, note=note)
