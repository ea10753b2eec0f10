"""`dpn eval fewshot` in a folder: several networks or draws, compared on the same draws of the images."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.engine.memory import is_out_of_memory
from dpn_cli.errors import DataError, OutOfMemoryError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import refuse_ranks
from dpn_cli.run.files import make_folder, read_object, replace_json
from dpn_cli.run.run import Run, open_run
from dpn_cli.sweep.grid import LONGEST, Trial, folders_of, format_network, settings_of
from dpn_cli.sweep.pairs import Result, build_result
from dpn_cli.sweep.runner import (
    DATA_CHANGED,
    RESULT,
    catch_failure,
    check_weights,
    is_complete,
    prefix_errors,
    save_result,
    save_start,
)
from tasks.classify.fewshot import ProbedNetwork, ProbeFeatures, Splits, encode_splits, open_splits
from tasks.classify.options import ProbeFolder, ProbeOptions


def probe_sweep(options: ProbeOptions, launch: LaunchOptions, console: Console) -> Result:
    """Probe every network with every draw and return the result; finished draws are not repeated.

    All networks are loaded before the first image is encoded. A network that runs out of memory, or has NaN or
    infinite features, is listed in the result and retried on resume; other errors raise `DpnError`.
    """
    config = options.model_copy(update={"run": ProbeFolder()})
    with open_run(config, options.runtime, "comparison", launch, _folder(options), console) as run:
        refuse_ranks(run.world, "eval fewshot")
        trials = _trials(run.config, run.config.compare or ("",))
        result = run.folder.result if is_complete(run.folder, trials) else None
        return result or _probe_networks(run)


def _trials(options: ProbeOptions, networks: Iterable[str]) -> list[Trial]:
    """Return a trial for every draw and network."""
    folders = folders_of(options.compare)
    return [
        Trial(name, seed, f"{folders[name]}/seed{seed}" if folders else f"seed{seed}")
        for name in networks
        for seed in options.seeds
    ]


def _folder(options: ProbeOptions) -> Path:
    """Return runs/fewshot/NETWORKS; the networks replace {stem} in the checkpoint's name."""
    versus = "-vs-".join(folders_of(options.compare).values())[: 2 * LONGEST]
    name = Path(options.checkpoint or "").stem
    return Path("runs") / "fewshot" / (name.replace("{stem}", versus) if "{stem}" in name else versus)


def _load_networks(run: Run[ProbeOptions]) -> tuple[dict[str, str], bool]:
    """Load every network once, log its report, and return the locations of the weights, by the networks' names.

    With them comes whether one of the networks was trained on images turned by their EXIF orientation.
    """
    options = run.config
    locations, digests, exif = {}, {}, False
    for name, location in (options.checkpoints or {"": str(options.checkpoint)}).items():
        with prefix_errors(name) if name else nullcontext():
            probed = ProbedNetwork.load(location, options)
            model, exif = probed.model, exif or probed.exif
            stem = settings_of(name).get("stem") if name else None
            if stem not in (None, model.config.stem):
                raise DataError(f"{location} has stem {model.config.stem}; name the weights of each network")
        network = name or model.config.stem
        locations[network], digests[network] = location, model.report.digest
        run.console.info(f"{format_network(network)}: {model.report.summary()}")
    check_weights(run.folder, digests)
    save_start(run, digests, {})
    return locations, exif


def _probe_networks(run: Run[ProbeOptions]) -> Result:
    """Probe with the draws that are missing, network by network, and write the result."""
    options, folder = run.config, run.folder
    locations, exif = _load_networks(run)
    splits = open_splits(options, exif=exif)
    data, trials = splits.fingerprints, _trials(options, locations)
    if folder.facts.get("data", data) != data:
        raise DataError(f"{folder.path}: {DATA_CHANGED}")
    folder.update(data=data)
    failed: dict[str, str] = {}
    for name, location in locations.items():
        missing = [trial for trial in trials if trial.network == name and _read_result(run, trial) is None]
        with catch_failure(format_network(name), run.world, run.console) as errors:
            if missing:
                _probe(run, location, missing, splits)
        if errors:
            failed |= {trial.folder: f"{trial.label}: {errors[0]}" for trial in missing}
    results = {trial.folder: result for trial in trials if (result := _read_result(run, trial)) is not None}
    scores = [_score_key(shots) for shots in reversed(options.shots)]  # most shots are the headline
    result = build_result(scores, trials, results, failed, compared=bool(options.compare))
    result["scores"].reverse()
    result |= {"data": options.source, "fingerprints": data, "classes": len(splits.classes)}
    save_result(folder, result)
    return result


def _read_result(run: Run[ProbeOptions], trial: Trial) -> Result | None:
    return read_object(run.folder.path / trial.folder / RESULT)


def _probe(run: Run[ProbeOptions], location: str, trials: Sequence[Trial], splits: Splits) -> None:
    """Encode all images by one network, and write the accuracies of some of its draws."""
    network = ProbedNetwork.load(location, run.config)
    facts = {"task": "fewshot", **network.facts(splits.test, run.world, run.console)}
    features = _encode(network, splits, run)
    for trial in trials:
        signals.check_here()
        run.console.info(trial.label)
        accuracies = {_score_key(shots): features.accuracy(shots, trial.seed) for shots in run.config.shots}
        make_folder(run.folder.path / trial.folder)
        replace_json(run.folder.path / trial.folder / RESULT, {**facts, "seed": trial.seed, **accuracies})


def _encode(network: ProbedNetwork, splits: Splits, run: Run[ProbeOptions]) -> ProbeFeatures:
    """Encode all images. Raises `OutOfMemoryError`, and as ``encode_splits`` does."""
    device, options = run.world.device, run.config
    try:
        return encode_splits(network.model.to(device), splits, options, device, run.console, network.transform)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    raise OutOfMemoryError(f"out of memory with {options.batch_size} images at a time; use a smaller --batch-size")


def _score_key(shots: int) -> str:
    return f"{shots}-shot"
