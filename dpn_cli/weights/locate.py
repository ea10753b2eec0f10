"""Locate weights, a path, a hub repository or a timm model, and open them as a `Checkpoint`."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from dpn_cli.arch import did_you_mean
from dpn_cli.errors import DataError, DpnError
from dpn_cli.weights.formats import Checkpoint, formats_of, read_file
from dpn_cli.weights.formats.checkpoint_files import CONFIG_NAMES, INPUTS_NAME, WEIGHT_NAMES
from dpn_cli.weights.formats.state_dict import Contents
from dpn_cli.weights.formats.timm_vit import apply_facts, build_empty
from dpn_cli.weights.hub import fetch_if_exists, hub_is_offline


def open_checkpoint(checkpoint: str) -> Checkpoint:
    """Read the weights of ``--checkpoint``: a path, ``timm:NAME`` or ``hf-hub:OWNER/NAME[/FILE]``.

    Raises:
        DpnError: a name of another form, or a timm model that is not a ViT.
        DataError: a missing, damaged, unreachable or unknown file.
    """
    kind, _, name = checkpoint.partition(":")
    if kind == "timm" and name:
        return _open_timm_model(name)
    if kind == "hf-hub" and name:
        return _open_hub_file(name)
    return read_file(Path(checkpoint).expanduser())


def _open_hub_file(name: str) -> Checkpoint:
    owner, _, repository = name.partition("/")
    repo, _, filename = repository.partition("/")
    if not owner or not repo:
        raise DpnError(f"hf-hub:{name}: write hf-hub:OWNER/NAME or hf-hub:OWNER/NAME/FILE")
    repo = f"{owner}/{repo}"
    weights = _fetch_first(repo, (filename,) if filename else WEIGHT_NAMES)
    if weights.name in WEIGHT_NAMES:
        _fetch_descriptions(repo, PurePosixPath(filename).parent, weights)
    checkpoint = read_file(weights)
    checkpoint.source = f"hf-hub:{name}"
    return checkpoint


def _fetch_first(repo: str, names: tuple[str, ...]) -> Path:
    """Fetch the first of `names` that a repository has.

    Raises `DataError` when it has none, and when a lookup fails, since the next file may be another network.
    """
    first_error: DataError | None = None
    for name in names:
        try:
            if path := fetch_if_exists(repo, name):
                return Path(path)
        except DataError as error:
            if not hub_is_offline():
                raise
            first_error = first_error or error  # the cache lists fetched files only
    raise first_error or DataError(
        f"hf-hub:{repo}: it contains none of {', '.join(names)}; name the file: hf-hub:{repo}/FILE"
    )


def _fetch_descriptions(repo: str, folder: PurePosixPath, weights: Path) -> None:
    """Fetch the description files of a library into the folder of the weights.

    Raises `DataError` when a lookup fails: eps, heads and inputs would be guessed.
    """
    first_error: DataError | None = None
    paths: dict[str, Path] = {}
    try:
        for name in CONFIG_NAMES:
            try:
                if path := fetch_if_exists(repo, str(folder / name)):
                    paths[name] = Path(path)
            except DataError as error:
                if not hub_is_offline():
                    raise
                first_error = first_error or error
        if first_error and not paths:
            raise first_error
        if "config.json" in paths and b'"model_type"' in paths["config.json"].read_bytes():
            fetch_if_exists(repo, str(folder / INPUTS_NAME))  # only transformers has the inputs in a separate file
    except DataError as error:
        raise DataError(
            f"{error}. That file describes the weights; name {weights} to read them without it and to assume what it "
            "would say"
        ) from error


def _open_timm_model(name: str) -> Checkpoint:
    """Fetch a timm model's weights and read eps, GELU, heads, grid and input range from its modules."""
    import timm

    if not timm.is_model(name):
        suggestion = did_you_mean(name.split(".")[0], timm.list_models()) or "; see timm.list_models('vit_*')"
        raise DpnError(f"timm:{name}: timm has no such model{suggestion}")
    try:
        apply_facts(Checkpoint({}, "timm", "none", 1e-6, "gelu"), build_empty(name, {}))
    except DataError as error:
        raise DpnError(f"timm:{name}: {error}; dpn reads timm's ViTs") from error
    unreachable = hub_is_offline()
    try:
        model = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError) as error:  # the hub client's errors are of both kinds
        reason = "the hub is out of reach and the weights are not in its cache" if unreachable else str(error)[:160]
        raise DataError(
            f"timm:{name}: {reason}. On a machine with a network: "
            f"timm.create_model({name!r}, pretrained=True), then copy the hub cache or a state dict "
            "here and pass its path"
        ) from error
    try:
        (file_format,) = formats_of(list(model.state_dict()))
        config = {"architecture": name.split(".")[0], "pretrained_cfg": model.pretrained_cfg}
        checkpoint = file_format.read(Contents(model.state_dict(), config=config))
    except (DataError, ValueError) as error:
        raise DpnError(f"timm:{name}: {error}; dpn reads timm's ViTs") from error
    checkpoint.source = f"timm:{name}"
    return checkpoint
