"""The demo's image tower: made once by `dpn pretrain --data demo`, then shared by the demos that start from one."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from pathlib import Path

from dpn_cli.config.launch import LaunchOptions
from dpn_cli.config.load import build, merge
from dpn_cli.config.paths import home
from dpn_cli.run.console import Console
from tasks.classify import pretrain_config


def demo_backbone(stem: str, console: Console, *, trained: bool = True) -> str:
    """Return the path of the demo tower's weights in ``$DPN_HOME/weights``; train it if it does not exist.

    Without `trained`, a missing tower gets random weights, in a file that is deleted when the process ends.
    Raises `DpnError` and its subclasses; a training that was stopped continues at the next call.
    """
    path = home() / "weights" / f"demo-{stem}.safetensors"
    if path.is_file():
        console.info(f"image tower: {path}, made by the config of 'dpn pretrain --data demo'")
        return str(path)
    plain = pretrain_config.resolve("imagenet", None, None, None, {"data": {"source": "demo"}}, {})
    built = build(pretrain_config.PretrainConfig, merge(plain, {"backbone": {"stem": stem}}), "demo tower")
    if not trained:
        return _build_untrained(built, console)
    console.info(f"no image tower yet: 'dpn pretrain --data demo' first makes {path}, for all demos to come")
    from tasks.classify import pretrain as command
    from tasks.classify.classifier import WEIGHTS

    folder = home() / "runs" / path.stem
    launch = LaunchOptions(folder, resume=folder.is_dir(), explicit_keys=("data.source", "backbone.stem"))
    result = command.run(built, launch, console)
    if result is not None:  # on the leading rank
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / WEIGHTS).replace(path)
        shutil.rmtree(folder)
    return str(path)


def _build_untrained(config: pretrain_config.PretrainConfig, console: Console) -> str:
    console.info(
        "no image tower yet: the dry run takes one of random weights; a training would make it first, as "
        "'dpn pretrain --data demo' does"
    )
    from dpn_cli.data.sources.synthetic import LABELS
    from tasks.classify.classifier import Classifier, save_classifier
    from tasks.classify.train import load_network

    folder = Path(tempfile.mkdtemp(prefix="dpn-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, classes = folder / f"demo-{config.backbone.stem}.safetensors", LABELS["demo_object"]
    save_classifier(Classifier(load_network(config, len(classes)), classes, config.loss, None, {}), path)
    return str(path)
