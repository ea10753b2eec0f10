"""Our network inside mmsegmentation: built from the configuration that comes along, trained, run over an image."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from dpn_cli.errors import DpnError
from dpn_cli.weights.backbone import load_backbone
from support.segment import import_mmseg
from tasks.segment.artifact import Segmenter, save_segmenter
from tasks.segment.config import Evaluation, MaskData
from tasks.segment.labels import LabelRule
from tasks.segment.model import LinearSegmenter, initialize_head, use_imagenet_inputs
from tasks.segment.pairs import FolderPairs
from tasks.segment.palette import Class, ade20k
from tasks.segment.sliding_window import WindowPlan, label_map

CONFIG = Path(__file__).parents[3] / "tasks" / "segment" / "openmmlab_ade20k.py"
CLASSES = 6


@pytest.fixture(scope="module")
def segmenter() -> Segmenter:
    vit = load_backbone("mu/8", image_size=32, num_classes=CLASSES, seed=1)
    use_imagenet_inputs(vit)
    initialize_head(vit, "lecun_normal", 2)
    vit.get_parameter("head.bias").data.copy_(torch.linspace(-0.5, 0.5, CLASSES))
    classes = tuple(Class(str(index), (index, 0, 0)) for index in range(CLASSES))
    return Segmenter(
        LinearSegmenter(vit, final_norm=False).eval(), classes, MaskData(scale=(128, 32)), Evaluation(), {}
    )


def build(head: str | None, backbone: str | None, classes: int = CLASSES) -> Any:
    """Build the configuration's model at toy size."""
    import_mmseg()
    from mmengine.config import Config
    from mmseg.registry import MODELS
    from mmseg.utils import register_all_modules

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        register_all_modules()
        config = Config.fromfile(CONFIG)
        for section in (config.model.data_preprocessor, config.model.data_preprocessor.test_cfg):
            section.size = (32, 32)
        config.model.backbone.update(arch="mu/8", image_size=32, checkpoint=backbone, drop_path=0.0)
        config.model.decode_head.update(in_channels=32, channels=32, num_classes=classes, checkpoint=head)
        config.model.test_cfg.update(crop_size=(32, 32), stride=(21, 21))
        model = MODELS.build(config.model)
        model.init_weights()
    return model


def sample(height: int, width: int, seed: int = 0) -> tuple[torch.Tensor, Any]:
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)
    label = torch.randint(0, CLASSES, (1, height, width), generator=generator)
    item = SegDataSample(gt_sem_seg=PixelData(data=label))
    item.set_metainfo({"img_shape": (height, width), "ori_shape": (height, width), "pad_shape": (height, width)})
    return image, item


def test_encoder_decoder_with_our_weights_gives_our_label_map(segmenter: Segmenter, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_segmenter(segmenter, weights)
    model = build(str(weights), str(weights)).eval()
    plan = WindowPlan(32, 21, (128, 32))
    for size in ((45, 90), (20, 90)):  # the second is lower than a window
        image, item = sample(*size)
        result = model.test_step({"inputs": [image.flip(0)], "data_samples": [item]})[0]  # it takes BGR
        with torch.inference_mode():
            actual = label_map(segmenter.network, [image], size, plan)
        assert (result.pred_sem_seg.data[0] == actual).float().mean() > 0.999


def test_encoder_decoder_learns_through_our_backbone() -> None:
    model = build(None, None).train()
    batch = [sample(32, 32, seed) for seed in (1, 2)]
    data = model.data_preprocessor({"inputs": [i for i, _ in batch], "data_samples": [s for _, s in batch]}, True)
    losses = model(**data, mode="loss")
    losses["decode.loss_ce"].backward()
    idle = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not idle
    assert model.decode_head.conv_seg.weight.grad.abs().sum() > 0


def test_the_backbone_is_resized_and_decayed_as_in_app_g(segmenter: Segmenter, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_segmenter(segmenter, weights)
    model = build(None, str(weights))
    from mmengine.config import Config
    from mmengine.optim import build_optim_wrapper

    from tasks.segment.openmmlab import DPNBackbone

    config = Config.fromfile(CONFIG)
    groups = build_optim_wrapper(model, config.optim_wrapper).optimizer.param_groups
    assert all({p.ndim != 1 for p in group["params"]} == {group["weight_decay"] == 0.01} for group in groups)
    loads = [step for name in ("train", "test") for step in config[f"{name}_pipeline"] if "reduce_zero_label" in step]
    assert [step.reduce_zero_label for step in loads] == [True, True]
    small = segmenter.network.vit.pos_embed.detach().view(1, 4, 4, -1).permute(0, 3, 1, 2)
    large = F.interpolate(small, (8, 8), mode="bilinear", align_corners=False).flatten(2).transpose(1, 2)
    torch.testing.assert_close(DPNBackbone(checkpoint=str(weights), image_size=64).vit.pos_embed.data, large)


def test_a_head_of_other_classes_is_refused(segmenter: Segmenter, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    save_segmenter(segmenter, weights)
    with pytest.raises(DpnError, match="no head of 4 classes"):
        build(str(weights), str(weights), classes=4)


def test_labels_and_pairs_match_its_ade20k_data_set(tmp_path: Path) -> None:
    import_mmseg()
    from mmseg.datasets import ADE20KDataset
    from mmseg.utils import register_all_modules

    register_all_modules()
    for kind in ("images", "annotations"):
        (tmp_path / kind / "training").mkdir(parents=True)
    raw = np.random.default_rng(0).integers(0, 151, (4, 30, 40), dtype=np.uint8)
    for index, mask in enumerate(raw):
        Image.fromarray(mask).save(tmp_path / "annotations" / "training" / f"ADE_train_{index:08d}.png")
        Image.fromarray(np.stack([mask] * 3, -1)).save(tmp_path / "images" / "training" / f"ADE_train_{index:08d}.jpg")
    prefix = {"img_path": "images/training", "seg_map_path": "annotations/training"}
    pipeline = [{"type": "LoadImageFromFile"}, {"type": "LoadAnnotations"}]
    expected = ADE20KDataset(data_root=str(tmp_path), data_prefix=prefix, pipeline=pipeline)
    actual, rule = FolderPairs(tmp_path, "training"), LabelRule(150, 1, 0)
    assert len(actual) == len(expected) == 4
    assert [one.name for one in ade20k()] == [name.strip() for name in expected.metainfo["classes"]]
    assert [list(one.color) for one in ade20k()] == expected.metainfo["palette"]
    for index in range(4):
        pixels, mask = actual.load(index)
        item = expected[index]
        assert np.array_equal(rule.labels(mask, "here"), item["gt_seg_map"])
        assert np.abs(pixels[..., ::-1].astype(int) - item["img"]).mean() < 1  # another JPEG decoder
