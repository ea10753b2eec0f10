"""Weights by the names of hubs, from the cache; nothing here reaches a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from test_backbone import DPN, perturbed

from dpn_cli.backbone import load_backbone
from dpn_cli.errors import DataError


def fake_hub(repo: str, files: dict[str, Path]) -> None:
    """Lay out a hub repository as the client's cache does after a download."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(snapshot.name)
    for name, source in files.items():
        (snapshot / name).write_bytes(source.read_bytes())


@pytest.fixture
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.usefixtures("_hub")
def test_hub_weights_come_from_the_cache_with_their_input_range(tmp_path: Path) -> None:
    model = perturbed("vit_tiny_patch16_224", img_size=32)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"pretrained_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}})
    )
    fake_hub(
        "someone/vit",
        {
            "model.safetensors": tmp_path / "w.safetensors",
            "config.json": tmp_path / "config.json",
            "other.npz": Path(DPN),
        },
    )
    ours = load_backbone(checkpoint="hf-hub:someone/vit", stem="none", image_size=32).eval()
    assert (ours.mean, ours.std) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(ours.forward_features(image), model.forward_features(image), atol=1e-5, rtol=1e-5)
    assert load_backbone(checkpoint="hf-hub:someone/vit/other.npz", image_size=32).config.stem == "dpn"


@pytest.mark.usefixtures("_hub")
def test_timm_names_come_from_the_cache_with_timms_facts(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    weights = timm.create_model(name).eval()
    save_file(weights.state_dict(), tmp_path / "w.safetensors")
    fake_hub(f"timm/{name}", {"model.safetensors": tmp_path / "w.safetensors"})
    ours = load_backbone(checkpoint=f"timm:{name}", stem="none", image_size=224).eval()
    assert (ours.mean, ours.config.size.heads, ours.config.act, ours.config.eps) == ((0.5, 0.5, 0.5), 3, "gelu", 1e-6)
    image = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours.forward_features(image), weights.forward_features(image), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("_hub")
@pytest.mark.parametrize("checkpoint", ["hf-hub:someone/else", "timm:vit_tiny_patch16_224.augreg_in21k"])
def test_an_unreachable_hub_says_what_to_fetch(checkpoint: str) -> None:
    with pytest.raises(DataError, match="out of reach.*On a machine with a network"):
        load_backbone(checkpoint=checkpoint)


def test_an_unreachable_hub_is_noticed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    from dpn_cli import hub

    asked: list[float] = []

    def refuse(request: Any, timeout: float) -> None:
        asked.append(timeout)
        raise OSError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("dpn_cli.hub.urllib.request.urlopen", refuse)
    hub.offline.cache_clear()
    assert hub.offline()
    assert constants.HF_HUB_OFFLINE  # the client asks its cache from here on, without its retries
    assert hub.offline()
    assert asked == [hub.PROBE_SECONDS]
    hub.offline.cache_clear()
