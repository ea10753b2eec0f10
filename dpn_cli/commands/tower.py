"""The demo's image tower: made once by `dpn pretrain --data demo`, then shared by the demos that start from one."""

from __future__ import annotations

import shutil

from dpn_cli import recipe
from dpn_cli.console import Console
from dpn_cli.home import home
from tasks.pretrain import recipe as pretrain_recipe


def demo_tower(stem: str, console: Console) -> str:
    """Return the path of the demo tower's weights in ``$DPN_HOME/weights``; trains it if it is not there yet.

    Raises `DpnError` and its kin; a training that was stopped goes on at the next call.
    """
    path = home() / "weights" / f"demo-{stem}.safetensors"
    if path.is_file():
        console.info(f"image tower: {path}, made by the recipe of 'dpn pretrain --data demo'")
        return str(path)
    console.info(f"no image tower yet: 'dpn pretrain --data demo' first makes {path}, for all demos to come")
    plain = pretrain_recipe.resolve("imagenet", None, None, None, {"data": {"source": "demo"}}, {})
    built = recipe.build(
        pretrain_recipe.PretrainRecipe, recipe.merge(plain, {"backbone": {"stem": stem}}), "demo tower"
    )
    from dpn_cli.classifier import WEIGHTS  # torch loads here
    from tasks.pretrain.command import start

    folder = home() / "runs" / path.stem
    result = start(built, folder, resume=folder.is_dir(), overwrite=False, dry_run=False, console=console)
    if result is not None:  # on the leading rank
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / WEIGHTS).replace(path)
        shutil.rmtree(folder)
    return str(path)
