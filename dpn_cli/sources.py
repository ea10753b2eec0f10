"""Where weights come from: a path, a hub repository or a timm model, opened as a `Checkpoint`."""

from __future__ import annotations

import contextlib
from pathlib import Path, PurePosixPath

from dpn_cli.arch import did_you_mean
from dpn_cli.checkpoints import Checkpoint, formats_of, read_file
from dpn_cli.checkpoints.containers import CONFIG_NAMES, INPUTS_NAME, WEIGHT_NAMES
from dpn_cli.checkpoints.layout import Contents
from dpn_cli.checkpoints.timm_vit import apply_facts, build_empty
from dpn_cli.errors import DataError, DpnError
from dpn_cli.hub import fetch, offline


def open_checkpoint(checkpoint: str) -> Checkpoint:
    """Read the weights that ``--checkpoint`` names: a path, ``timm:NAME`` or ``hf-hub:OWNER/NAME[/FILE]``.

    Raises:
        DpnError: a name of another form, or a timm model that is no ViT.
        DataError: a missing, damaged, unreachable or unknown file.
    """
    kind, _, name = checkpoint.partition(":")
    if kind == "timm" and name:
        return _from_timm_model(name)
    if kind == "hf-hub" and name:
        return _from_hub(name)
    return read_file(Path(checkpoint).expanduser())


def _from_hub(name: str) -> Checkpoint:
    owner, _, rest = name.partition("/")
    repo, _, filename = rest.partition("/")
    if not owner or not repo:
        raise DpnError(f"--checkpoint hf-hub:{name}: write hf-hub:OWNER/NAME or hf-hub:OWNER/NAME/FILE")
    weights = _fetch_first(f"{owner}/{repo}", (filename,) if filename else WEIGHT_NAMES)
    if weights.name in WEIGHT_NAMES:
        for described in (*CONFIG_NAMES, INPUTS_NAME):
            with contextlib.suppress(DataError):  # libraries save some of them, or none
                fetch(f"{owner}/{repo}", str(PurePosixPath(filename).with_name(described)) if filename else described)
    checkpoint = read_file(weights)
    checkpoint.source = f"hf-hub:{name}"
    return checkpoint


def _fetch_first(repo: str, names: tuple[str, ...]) -> Path:
    first: DataError | None = None
    for name in names:
        try:
            return Path(fetch(repo, name))
        except DataError as error:
            first = first or error
    assert first is not None
    raise first


def _from_timm_model(name: str) -> Checkpoint:
    """Fetch a timm model's weights and take eps, GELU, heads, grid and input range from its own modules."""
    import timm

    if not timm.is_model(name):
        close = did_you_mean(name.split(".")[0], timm.list_models()) or "; see timm.list_models('vit_*')"
        raise DpnError(f"--checkpoint timm:{name}: timm has no such model{close}")
    try:
        apply_facts(Checkpoint({}, "timm", "none", 1e-6, "gelu"), build_empty(name, {}))
    except DataError as error:
        raise DpnError(f"--checkpoint timm:{name}: {error}; dpn reads timm's ViTs") from error
    unreachable = offline()
    try:
        model = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:  # the hub client's errors are of both kinds
        where = "the hub is out of reach and the weights are not in its cache" if unreachable else str(error)[:160]
        raise DataError(
            f"--checkpoint timm:{name}: {where}. On a machine with a network: "
            f"timm.create_model({name!r}, pretrained=True), then copy the hub cache or a state dict "
            "here and pass its path"
        ) from error
    try:
        (known,) = formats_of(list(model.state_dict()))
        config = {"architecture": name.split(".")[0], "pretrained_cfg": model.pretrained_cfg}
        checkpoint = known.read(Contents(model.state_dict(), config=config))
    except (DataError, ValueError) as error:
        raise DpnError(f"--checkpoint timm:{name}: {error}; dpn reads timm's ViTs") from error
    checkpoint.source = f"timm:{name}"
    return checkpoint
