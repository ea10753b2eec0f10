"""Weights by the names of hubs, from the cache; nothing here reaches a network."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors.torch import save_file

from dpn_cli.errors import DataError
from dpn_cli.weights.backbone import load_backbone
from support.backbones import perturbed_timm_model
from support.goldens import DPN_PARAMS

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fake_hub(repo: str, files: dict[str, Path]) -> None:
    """Lay out a hub repository as the client's cache does after a download."""
    from huggingface_hub import constants

    root = Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
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
    model = perturbed_timm_model("vit_tiny_patch16_224", img_size=32)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    (tmp_path / "config.json").write_text(
        json.dumps({"pretrained_cfg": {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}})
    )
    fake_hub(
        "someone/vit",
        {
            "model.safetensors": tmp_path / "w.safetensors",
            "config.json": tmp_path / "config.json",
            "other.npz": Path(DPN_PARAMS),
        },
    )
    actual = load_backbone(checkpoint="hf-hub:someone/vit", stem="none", image_size=32).eval()
    assert (actual.mean, actual.std) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    image = torch.randn(1, 3, 32, 32)
    torch.testing.assert_close(actual.forward_features(image), model.forward_features(image), atol=1e-5, rtol=1e-5)
    assert load_backbone(checkpoint="hf-hub:someone/vit/other.npz", image_size=32).config.stem == "dpn"


@pytest.mark.usefixtures("_hub")
def test_timm_names_come_from_the_cache_with_timms_facts(tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    weights = timm.create_model(name).eval()
    save_file(weights.state_dict(), tmp_path / "w.safetensors")
    fake_hub(f"timm/{name}", {"model.safetensors": tmp_path / "w.safetensors"})
    actual = load_backbone(checkpoint=f"timm:{name}", stem="none", image_size=224).eval()
    assert (actual.mean, actual.config.size.heads, actual.config.act, actual.config.eps) == (
        (0.5, 0.5, 0.5),
        3,
        "gelu",
        1e-6,
    )
    image = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(actual.forward_features(image), weights.forward_features(image), atol=1e-5, rtol=1e-5)


def answers(monkeypatch: pytest.MonkeyPatch, files: dict[str, Path | Exception]) -> list[str]:
    """Let the hub be in reach and answer with these files; of others it says that they are not there."""
    calls: list[str] = []

    def download(repo: str, filename: str) -> str:
        calls.append(filename)
        answer = files.get(filename, EntryNotFoundError("404 Client Error"))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    for module in ("hub", "locate"):
        monkeypatch.setattr(f"dpn_cli.weights.{module}.hub_is_offline", lambda: False)
    return calls


FAILURES = {
    "a server error": OSError("503 Server Error: Service Unavailable"),
    "a lost connection": LocalEntryNotFoundError("an error happened while trying to locate the file"),
    "a kind of its own": RuntimeError("the peer closed the connection\nwithout a word"),
}


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path | Exception]:
    """A ViT as transformers saves it, whose eps is not the default."""
    kind: Any = transformers.ViTConfig
    size = {"hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 6, "intermediate_size": 64}
    model: Any = transformers.ViTModel(kind(**size, image_size=32, patch_size=8, layer_norm_eps=1e-3))
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}')
    return {path.name: path for path in tmp_path.iterdir() if path.is_file()}


def test_a_description_that_is_certainly_not_there_leaves_facts_to_assume(
    saved: dict[str, Path | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch, saved)
    full = load_backbone(checkpoint="hf-hub:someone/vit", stem="none", image_size=32)
    assert (full.config.eps, full.config.size.heads, full.mean) == (1e-3, 6, (0.1, 0.2, 0.3))
    assert asked == ["model.safetensors", "config.json", "open_clip_config.json", "preprocessor_config.json"]
    for name in ("config.json", "preprocessor_config.json"):
        path = saved.pop(name)
        assert isinstance(path, Path)
        path.unlink()
    plain = load_backbone(checkpoint="hf-hub:someone/vit", stem="none", image_size=32)
    assert plain.config.eps == 1e-12
    assert any("eps 1e-12" in fact for fact in plain.report.assumed)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", ["config.json", "open_clip_config.json", "preprocessor_config.json"])
def test_a_description_that_cannot_be_fetched_is_an_error(
    failure: str, name: str, saved: dict[str, Path | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, {**saved, name: FAILURES[failure]})
    with pytest.raises(DataError, match=rf"hf-hub:someone/vit: .*{name}.*That file describes the weights") as caught:
        load_backbone(checkpoint="hf-hub:someone/vit", stem="none", image_size=32)
    assert "\n" not in str(caught.value)
    assert str(saved["model.safetensors"]) in str(caught.value)


@pytest.mark.parametrize("failure", FAILURES)
def test_weights_that_cannot_be_fetched_are_not_replaced_by_other_ones(
    failure: str, saved: dict[str, Path | Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answers(monkeypatch, {"model.safetensors": FAILURES[failure], "pytorch_model.bin": Path(DPN_PARAMS)})
    with pytest.raises(DataError, match="hf-hub:someone/vit: "):
        load_backbone(checkpoint="hf-hub:someone/vit", stem=None)
    assert asked == ["model.safetensors"]


def test_a_repository_without_weights_lists_the_expected_names(monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, {})
    with pytest.raises(
        DataError, match=r"it contains none of model.safetensors, .*; name the file: hf-hub:someone/vit/FILE"
    ):
        load_backbone(checkpoint="hf-hub:someone/vit", stem=None)


@pytest.mark.usefixtures("_hub")
def test_without_a_network_a_description_has_to_be_in_the_cache_or_known_not_to_be(
    saved: dict[str, Path | Exception],
) -> None:
    from huggingface_hub import constants

    weights = saved["model.safetensors"]
    assert isinstance(weights, Path)
    fake_hub("someone/vit", {"model.safetensors": weights})
    with pytest.raises(DataError, match=r"out of reach and config.json is not in the local cache"):
        load_backbone(checkpoint="hf-hub:someone/vit", stem="none", image_size=32)
    gone = Path(constants.HF_HUB_CACHE) / "models--someone--vit" / ".no_exist" / COMMIT
    gone.mkdir(parents=True)
    for name in ("config.json", "open_clip_config.json"):
        (gone / name).touch()  # as the client notes an answer of 404
    actual = load_backbone(checkpoint="hf-hub:someone/vit", stem="none", image_size=32)
    assert any("eps 1e-12" in fact for fact in actual.report.assumed)


@pytest.mark.usefixtures("_hub")
@pytest.mark.parametrize("checkpoint", ["hf-hub:someone/else", "timm:vit_tiny_patch16_224.augreg_in21k"])
def test_an_unreachable_hub_names_the_file_to_fetch(checkpoint: str) -> None:
    with pytest.raises(DataError, match="out of reach.*On a machine with a network"):
        load_backbone(checkpoint=checkpoint)


def test_an_unreachable_hub_is_noticed_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import close_session, constants, hf_hub_download

    from dpn_cli.weights import hub

    calls: list[float] = []

    def refuse(request: Any, timeout: float) -> None:
        calls.append(timeout)
        raise OSError("no route to host")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    monkeypatch.setattr("dpn_cli.weights.hub.urllib.request.urlopen", refuse)
    hub.hub_is_offline.cache_clear()
    assert hub.hub_is_offline()
    assert hub.hub_is_offline()
    assert calls == [hub.PROBE_SECONDS]
    try:
        with pytest.raises(LocalEntryNotFoundError) as caught:  # from here on, and without the client's retries
            hf_hub_download("someone/vit", "config.json")
        assert isinstance(caught.value.__cause__, OfflineModeIsEnabled)
        with pytest.raises(DataError, match="out of reach and config.json is not in the local cache"):
            hub.fetch_if_exists("someone/vit", "config.json")
        assert os.environ["HF_DATASETS_OFFLINE"] == "1"
    finally:
        hub.hub_is_offline.cache_clear()
        close_session()
