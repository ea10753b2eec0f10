"""Breakages of weight formats: (file, text, replacement, what it breaks, tests that should notice)."""

F = "tests/test_formats.py tests/test_backbone.py"
B = "tests/test_big_vision.py"
C = "tests/test_convert.py tests/test_export.py"
S = "tests/test_descriptions.py tests/test_formats.py"
BIG, TIMM, LAYOUT = "big_vision.py", "timm_vit.py", "layout.py"
AT = "dpn_cli/weights/formats/"
VIT, CONVERT, RETROFIT = "dpn_cli/model/vit.py", "dpn_cli/weights/convert.py", "dpn_cli/weights/retrofit.py"

MUTATIONS = [
    (AT + TIMM, "rows[:, :, None] + columns[:, None]", "rows[:, None] + columns[:, :, None]",
     "factorised positions have rows and columns exchanged", F),
    (AT + TIMM, 'config.get("norm_eps", checkpoint.eps)', "checkpoint.eps",
     "the description's eps is ignored", C + " " + S),
    (AT + TIMM, 'tuple(inputs["mean"]), tuple(inputs["std"])', "checkpoint.mean, checkpoint.std",
     "the description's mean and std are ignored", F + " " + S),
    (AT + TIMM, 'Checkpoint(state, "timm", stem_of(state), 1e-6,', 'Checkpoint(state, "timm", stem_of(state), 1e-5,',
     "a bare timm file has torch's eps", F),
    (AT + LAYOUT, 'state["cls_token"] = state["cls_token"].float() + posemb[:, :1].float()',
     'state["cls_token"] = state["cls_token"].float()',
     "the class token loses its position", F),
    (AT + LAYOUT, 'gamma[:, None] * state[f"{module}.weight"].float()', 'state[f"{module}.weight"].float()',
     "layer scale is dropped", F),
    (AT + LAYOUT, "reshape(len(weight), side, side, 3).permute(0, 3, 1, 2)",
     "reshape(len(weight), 3, side, side)",
     "linear projections are read channel by channel", F),
    (AT + LAYOUT, 'state[fused] = torch.cat([state.pop(part) for part in parts])',
     'state[fused] = torch.cat([state.pop(part) for part in reversed(parts)])',
     "query, key and value are stacked in another order", F + " " + B),
    (AT + BIG, "value.permute(3, 2, 0, 1)", "value.permute(3, 2, 1, 0)",
     "convolutions of big_vision are transposed", B),
    (AT + BIG, "return value.flatten(1).T", "return value.flatten(1)",
     "attention kernels of big_vision are not transposed", B),
    (CONVERT, '"pretrained_cfg": {"mean": list(model.mean), "std": list(model.std)',
     '"pretrained_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3',
     "mean and std are not written for timm", C),
    (CONVERT, "        return math.inf", "        pass",
     "outputs that are not numbers pass the proof", C),
    # Not ones: the norms take a constant away.
    (CONVERT, "torch.cat([torch.zeros(1, 1, config.size.width)", "torch.cat([torch.arange(config.size.width)[None, None]",
     "timm's class token gets a position", C),
    (RETROFIT, "== HELD_OUT - 1) == held_out", "== HELD_OUT - 1) != held_out",
     "the retrofit is measured on the images that it was fitted on", "tests/test_convert.py"),
    (VIT, "align_corners=align_corners, antialias", "align_corners=False, antialias",
     "positions are resampled without aligned corners", "tests/test_vit.py"),
    ("dpn_cli/weights/inferred.py", 'native or 224, (rows, columns)', "224, (rows, columns)",
     "a checkpoint's own image size is ignored", F + " tests/test_convert.py"),
]  # fmt: skip
