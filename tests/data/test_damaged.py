"""Two thousand damaged files: each ends in a whole, finite network or in one clear line, and none runs code."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dpn_cli.errors import DataError, DpnError
from dpn_cli.weights.backbone import export_backbone, load_backbone, load_with_head
from dpn_cli.weights.formats import read_file
from support.damage import DAMAGES
from support.goldens import GOLDENS
from support.norm_files import make_dtn_state, make_slab_state
from support.weight_files import build_torchvision_vit, build_transformers_base, naflex_builder

DPN = GOLDENS / "vit_dpn.params.npz"
FILES = int(os.environ.get("DPN_DAMAGED", "1000"))


ALTERED: tuple[Callable[[str, Tensor], dict[str, Tensor]], ...] = (
    lambda name, value: {name[::-1]: value},
    lambda name, value: {name + "x": value},
    lambda name, value: {},
    lambda name, value: {name: value, "surprise.weight": torch.zeros(3)},
    lambda name, value: {name: value.to(torch.int64)},
    lambda name, value: {name: value.to(torch.bool)},
    lambda name, value: {name: value.to(torch.complex64)},
    lambda name, value: {name: value.to(torch.bfloat16)},
    lambda name, value: {name: value.double()},
    lambda name, value: {name: value.reshape(-1)},
    lambda name, value: {name: value[None]},
    lambda name, value: {name: value.new_zeros(0, *value.shape[1:])},
    lambda name, value: {name: torch.full_like(value, torch.nan)},
    lambda name, value: {name: torch.zeros(1).expand(10**9)},
    lambda name, value: {name: value, f"module.{name}": value.clone()},
)


def alter(state: dict[str, Tensor], g: np.random.Generator) -> dict[str, Tensor]:
    """Rename, drop, add, retype or reshape one tensor of a state dict, or poison its values."""
    name = sorted(state)[int(g.integers(0, len(state)))]
    remaining = {key: kept for key, kept in state.items() if key != name}
    return {**remaining, **ALTERED[int(g.integers(0, len(ALTERED)))](name, state[name])}


def to_bytes(state: dict[str, Tensor], container: str, folder: Path) -> bytes:
    path = folder / "whole"
    full = {name: value.contiguous() if value.numel() < 10**6 else value for name, value in state.items()}
    if container == "safetensors":
        small = {name: value if value.numel() < 10**6 else torch.zeros(7) for name, value in full.items()}
        save_file(small, path)
    elif container.startswith("torch"):
        torch.save(full, path, _use_new_zipfile_serialization=container == "torch")
    else:
        buffer = io.BytesIO()
        arrays: dict[str, Any] = {
            n: (v.float() if v.dtype == torch.bfloat16 else v).numpy() for n, v in full.items() if v.numel() < 10**6
        }
        (np.savez_compressed if container == "npz compressed" else np.savez)(buffer, **arrays)
        return buffer.getvalue()
    return path.read_bytes()


@pytest.fixture(scope="module")
def sources() -> dict[str, dict[str, Tensor]]:
    """The state dicts that get damaged: one per family of names."""
    with np.load(DPN) as arrays:
        big_vision = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    with np.load(GOLDENS / "vit_pytorch_1.0.0.npz") as arrays:
        lucidrains = {n.removeprefix("state/"): torch.from_numpy(arrays[n]) for n in arrays.files if "/" in n}
    with np.load(GOLDENS / "open_clip_2.20.0_patchnorm.npz") as arrays:
        clip = {n.removeprefix("state/"): torch.from_numpy(arrays[n]) for n in arrays.files if "/" in n}
    plain = load_backbone("mu/8", stem="none", image_size=16, num_classes=3)
    return {
        "big_vision": big_vision,
        "vit-pytorch": lucidrains,
        "open_clip": clip,
        "timm": plain.state_dict(),
        "timm NaFlexViT": naflex_builder(dual=True)(16).state_dict(),
        "torchvision": build_torchvision_vit(16).state_dict(),
        "transformers": build_transformers_base(16).state_dict(),
        "DTN": make_dtn_state(3, 2),
        "DTN, LayerNorm": make_dtn_state(11, 0),
        "SLAB": make_slab_state(2, linear_norm=True),
    }


CONTAINERS = ("npz", "npz compressed", "safetensors", "torch", "torch legacy")


@pytest.mark.parametrize("container", CONTAINERS)
def test_damaged_files_end_in_a_network_or_in_one_line(
    container: str, sources: dict[str, dict[str, Tensor]], tmp_path: Path
) -> None:
    outcomes, codes = {"whole": 0, "refused": 0}, set[int]()
    g = np.random.default_rng(CONTAINERS.index(container))
    names = list(sources)
    untouched = {name: to_bytes(state, container, tmp_path) for name, state in sources.items()}
    path = tmp_path / "damaged"
    for number in range(FILES // len(CONTAINERS)):
        name = names[number % len(names)]
        if number % 3 == 0:
            data = to_bytes(alter(sources[name], g), container, tmp_path)
        else:
            data = DAMAGES[number % len(DAMAGES)](untouched[name], g)
        path.write_bytes(data)
        try:
            source = read_file(path)
            source.heads = source.heads or 2
            state = load_with_head(source, 32).state_dict()
        except DpnError as error:
            message, outcome, codes = str(error), "refused", codes | {error.exit_code}
        else:
            message, outcome = str(path), "whole"
            assert not any(value.is_meta for value in state.values())
            assert all(torch.isfinite(value).all() for value in state.values())
        assert str(path) in message
        assert "\n" not in message
        outcomes[outcome] += 1
    assert codes == {3}  # it is the file that is wrong, not the command
    assert outcomes["refused"] > outcomes["whole"] > 0  # flips inside a tensor leave another network, not a broken one


def test_a_zip_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**34,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for number in range(65):
            archive.writestr(f"{number}.npy", header.getvalue() + bytes(2**24))
    assert path.stat().st_size < 2**23
    with pytest.raises(DataError, match="bytes that unpack to"):
        read_file(path)


@pytest.mark.parametrize("shape", [(2**40,), (2**62, 4), (-1,)])
def test_a_header_that_claims_more_than_its_file_holds_is_refused(shape: tuple[int, ...], tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "claims.npz", "w") as archive:
        archive.writestr("cls.npy", header.getvalue() + bytes(64))
    with pytest.raises(DataError, match="claims shape"):
        read_file(tmp_path / "claims.npz")


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["weights.pth", "weights.npz", "weights.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_pickles_of_every_protocol_and_name_run_nothing(name: str, protocol: int, tmp_path: Path) -> None:
    path, target = tmp_path / name, tmp_path / "executed"
    path.write_bytes(pickle.dumps({"state_dict": {"patch_embed.proj.weight": Bomb(target)}}, protocol))
    with pytest.raises(DataError, match="not a file of plain tensors"):
        read_file(path)
    assert not target.exists()


def test_the_container_is_inferred_from_content_not_from_the_name(tmp_path: Path) -> None:
    model = load_backbone("mu/8", image_size=16)
    export_backbone(model, tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").rename(tmp_path / "a.pth")
    assert load_backbone(checkpoint=str(tmp_path / "a.pth"), image_size=16).report.format == "dpn"
    (tmp_path / "b.bin").write_bytes(DPN.read_bytes())
    assert load_backbone(checkpoint=str(tmp_path / "b.bin"), image_size=32).report.format == "big_vision"
