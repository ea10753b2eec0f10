"""Few-shot probes of several networks on the same draws, every draw kept: `dpn eval fewshot` with a run's folder."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dpn_cli.commands.report import page_at_end
from dpn_cli.commands.trainers import classify_options, module_of
from dpn_cli.config.launch import LaunchOptions
from dpn_cli.engine.memory import is_out_of_memory
from dpn_cli.errors import DataError, NonFiniteError, OutOfMemoryError
from dpn_cli.run import signals
from dpn_cli.run.console import Console
from dpn_cli.run.distributed import refuse_ranks
from dpn_cli.run.files import make_folder, read_object, replace_json
from dpn_cli.run.run import Run, open_run
from dpn_cli.run.run_dir import describe_device
from dpn_cli.sweep.grid import LONGEST, folders_of, format_network, settings_of
from dpn_cli.sweep.pairs import ComparedTrial, build_result, check_weights, keep_result, prefix_errors

Result = dict[str, Any]
fewshot = module_of("eval fewshot")  # it loads torch, as this module does
DRAWS = "draws of the images"
RESULT = "result.json"


def probe_sweep(options: classify_options.ProbeOptions, console: Console) -> Result:
    """Probe every network with every draw and return the comparison; what is there from before is not done again.

    All networks are loaded before the first image is encoded. A network that runs out of memory or has features that
    are no numbers is noted in the result and tried again on resume; everything else raises `DpnError`.
    """
    how, config = options.run, options.model_copy(update={"run": classify_options.ProbeFolder()})
    folders: list[Path] = []
    launch = LaunchOptions(how.output_dir, how.resume, how.overwrite, on_open=folders.append)
    with open_run(config, options.runtime, "comparison", launch, _folder(options), console) as run:
        refuse_ranks(run.world, "eval fewshot")
        result = run.folder.result if _complete(run) else None
        result = result or _ProbeSweep(run).probe_all()
    if not how.no_report:
        page_at_end(folders[0], console)
    return result


def _cells(options: classify_options.ProbeOptions, names: Iterable[str]) -> list[ComparedTrial]:
    """Return a cell for every draw of each of the networks called `names`."""
    folders = folders_of(options.compare)
    return [
        ComparedTrial(name, seed, f"{folders[name]}/seed{seed}" if folders else f"seed{seed}")
        for name in names
        for seed in options.seeds
    ]


def _complete(run: Run[classify_options.ProbeOptions]) -> bool:
    """Return whether the folder has the result of every draw. What one network is called makes no difference to it."""
    options, path = run.config, run.folder.path
    return all((path / one.folder / RESULT).is_file() for one in _cells(options, options.compare or ("",)))


def _folder(options: classify_options.ProbeOptions) -> Path:
    """Return runs/fewshot/NETWORKS; the networks stand in the place of {stem} in the checkpoint's name."""
    versus = "-vs-".join(folders_of(options.compare).values())[: 2 * LONGEST]
    name = Path(options.checkpoint or "").stem
    return Path("runs") / "fewshot" / (name.replace("{stem}", versus) if "{stem}" in name else versus)


class _ProbeSweep:
    """The networks of a run of probes, where their weights are, and the cells: a draw for a network each."""

    def __init__(self, run: Run[classify_options.ProbeOptions]) -> None:
        self.run, self.options, self.folder = run, run.config, run.folder
        self.places = self._load()
        self.cells = _cells(self.options, self.places)

    def _load(self) -> dict[str, str]:
        """Load every network once, say how that went, and return where their weights are, by their names."""
        options, world = self.options, self.run.world
        places, digests = {}, {}
        for name, place in (options.checkpoints or {"": str(options.checkpoint)}).items():
            with prefix_errors(name) if name else nullcontext():
                model = fewshot.Probed.load(place, options).model
                stem = settings_of(name).get("stem") if name else None
                if stem not in (None, model.config.stem):
                    raise DataError(f"{place} has stem {model.config.stem}; name the weights of each network")
            called = name or model.config.stem
            places[called], digests[called] = place, model.report.digest
            self.run.console.info(f"{format_network(called)}: {model.report.summary()}")
        check_weights(self.folder, digests)
        self.folder.update(device=describe_device(world.device), ranks=1, status="running", digests=digests)
        return places

    def probe_all(self) -> Result:
        """Probe what is missing, and write the result."""
        options, splits = self.options, fewshot.open_splits(self.options)
        data = splits.fingerprints
        if self.folder.facts.get("data", data) != data:
            raise DataError(
                f"{self.folder.path}: the data have changed since this comparison began; start another with -o"
            )
        self.folder.update(data=data)
        failed: dict[str, str] = {}
        for name, place in self.places.items():
            missing = [cell for cell in self.cells if cell.network == name and self._done(cell) is None]
            try:
                if missing:
                    self._probe(place, missing, splits)
            except (NonFiniteError, OutOfMemoryError) as error:
                self.run.console.warn(f"{format_network(name)} failed: {error}")
                failed |= {cell.folder: f"{cell.label}: {error}" for cell in missing}
        done = {cell.folder: found for cell in self.cells if (found := self._done(cell)) is not None}
        scores = [_score(shots) for shots in reversed(options.shots)]  # most shots are the headline
        result = build_result(scores, self.cells, done, failed, compared=bool(options.compare))
        result["scores"].reverse()
        result |= {"data": options.source, "fingerprints": data, "classes": len(splits.classes)}
        keep_result(self.folder, result)
        return result

    def _done(self, cell: ComparedTrial) -> Result | None:
        return read_object(self.folder.path / cell.folder / RESULT)

    def _probe(self, place: str, cells: list[ComparedTrial], splits: Any) -> None:
        """Encode all images by one network, and write what it reaches with the draws of some cells."""
        network = fewshot.Probed.load(place, self.options)
        facts = {"task": "fewshot", **network.facts(splits.test, self.run.world, self.run.console)}
        features = _features(network, splits, self.run)
        for cell in cells:
            signals.check_here()
            self.run.console.info(cell.label)
            accuracies = {_score(shots): features.accuracy(shots, cell.seed) for shots in self.options.shots}
            make_folder(self.folder.path / cell.folder)
            replace_json(self.folder.path / cell.folder / RESULT, {**facts, "seed": cell.seed, **accuracies})


def _features(network: Any, splits: Any, run: Run[classify_options.ProbeOptions]) -> Any:
    """Encode all images. Raises `OutOfMemoryError`, and as ``encode_splits`` does."""
    device, options = run.world.device, run.config
    try:
        return fewshot.encode_splits(network.model.to(device), splits, options, device, run.console, network.whole)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    raise OutOfMemoryError(f"out of memory with {options.batch_size} images at a time; use a smaller --batch-size")


def _score(shots: int) -> str:
    return f"{shots}-shot"
