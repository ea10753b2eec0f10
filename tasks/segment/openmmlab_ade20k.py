"""A configuration of mmsegmentation: Appendix G of arXiv 2302.01327 with our backbone and linear head.

Appendix G does not resize validation images; this does, as mmsegmentation's configurations do.
Change ``decode_head`` (and the backbone's ``out_indices``) for UPerNet or a mask decoder. With OpenMMLab's tools:
``python tools/train.py openmmlab_ade20k.py --cfg-options model.backbone.checkpoint=B-16-dpn.npz``.
"""

crop, scale, iterations = (512, 512), (2048, 512), 161_664
default_scope = "mmseg"
custom_imports = {"imports": ["tasks.segment.openmmlab"], "allow_failed_imports": False}

model = {
    "type": "EncoderDecoder",
    "data_preprocessor": {
        "type": "SegDataPreProcessor",
        "mean": [123.675, 116.28, 103.53],
        "std": [58.395, 57.12, 57.375],
        "bgr_to_rgb": True,
        "pad_val": 0,
        "seg_pad_val": 255,
        "size": crop,
        "test_cfg": {"size": crop},  # images of more than 4:1 are lower than a window
    },
    "backbone": {"type": "DPNBackbone", "arch": "B/16", "stem": "dpn", "image_size": 512, "drop_path": 0.1},
    "decode_head": {
        "type": "LinearHead",
        "in_channels": 768,
        "channels": 768,
        "in_index": -1,
        "num_classes": 150,
        "loss_decode": {"type": "CrossEntropyLoss", "avg_non_ignore": True},
    },
    "test_cfg": {"mode": "slide", "crop_size": crop, "stride": (341, 341)},
}

dataset = {"type": "ADE20KDataset", "data_root": "ADEChallengeData2016"}
train_pipeline = [
    {"type": "LoadImageFromFile"},
    {"type": "LoadAnnotations", "reduce_zero_label": True},
    {"type": "RandomResize", "scale": scale, "ratio_range": (0.5, 2.0), "keep_ratio": True},
    {"type": "RandomCrop", "crop_size": crop, "cat_max_ratio": 0.75},
    {"type": "RandomFlip", "prob": 0.5},
    {"type": "PhotoMetricDistortion"},
    {"type": "PackSegInputs"},
]
test_pipeline = [
    {"type": "LoadImageFromFile"},
    {"type": "Resize", "scale": scale, "keep_ratio": True},
    {"type": "LoadAnnotations", "reduce_zero_label": True},
    {"type": "PackSegInputs"},
]
train_dataloader = {
    "batch_size": 16,
    "num_workers": 8,
    "sampler": {"type": "InfiniteSampler", "shuffle": True},
    "dataset": {
        **dataset,
        "data_prefix": {"img_path": "images/training", "seg_map_path": "annotations/training"},
        "pipeline": train_pipeline,
    },
}
val_dataloader = test_dataloader = {
    "batch_size": 1,
    "num_workers": 4,
    "sampler": {"type": "DefaultSampler", "shuffle": False},
    "dataset": {
        **dataset,
        "data_prefix": {"img_path": "images/validation", "seg_map_path": "annotations/validation"},
        "pipeline": test_pipeline,
    },
}
val_evaluator = test_evaluator = {"type": "IoUMetric", "iou_metrics": ["mIoU"]}

optim_wrapper = {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 3e-5, "weight_decay": 0.01}}
# Scenic's rule: what has one axis is not decayed.
optim_wrapper["paramwise_cfg"] = {"norm_decay_mult": 0.0, "bias_decay_mult": 0.0}
param_scheduler = [{"type": "PolyLR", "eta_min": 0.0, "power": 0.9, "begin": 0, "end": iterations, "by_epoch": False}]
train_cfg = {"type": "IterBasedTrainLoop", "max_iters": iterations, "val_interval": 16_000}
val_cfg, test_cfg = {"type": "ValLoop"}, {"type": "TestLoop"}
log_processor = {"by_epoch": False}
default_hooks = {
    "logger": {"type": "LoggerHook", "interval": 50, "log_metric_by_epoch": False},
    "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 16_000, "max_keep_ckpts": 2},
}
