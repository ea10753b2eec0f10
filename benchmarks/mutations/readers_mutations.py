"""Breakages of readers of DTN's, SLAB's and BEiT-3's weights, and of folding: (file, text, replacement, what, tests)."""

T = "tests/test_norm_files.py"
D = "tests/test_descriptions.py tests/test_formats.py"
B = "tests/test_blocks.py"
DTN, SLAB, TIMM = (f"dpn_cli/weights/formats/{name}.py" for name in ("dtn_vit", "slab_deit", "timm_vit"))
FOLD = "dpn_cli/weights/fold.py"

MUTATIONS = [
    (DTN, '"both" if "blocks.0.norm1.mean_norm_weight" in state else "variance"', '"both"',
     "DTN of variances alone is read as DTN of both", T),
    (DTN, "dtn_blocks=None if blocks == usual_dtn_blocks(depth) else blocks", "dtn_blocks=None",
     "every network has DTN in the usual number of blocks", T),
    (DTN, "    if blocks == depth:\n", "    if False:\n", "DTN in all blocks is read as a network", T),
    (DTN, 'len(state["blocks.0.norm1.var_norm_weight"])', '_HEADS.get(state["patch_embed.proj.weight"].shape[0])',
     "DTN's heads are guessed from its width", T),
    (DTN, "eps=1e-5", "eps=1e-6", "DTN's networks have timm's eps", T),
    (DTN, "mean=IMAGENET_MEAN", "mean=(0.5, 0.5, 0.5)", "DTN's networks have another mean", T),
    (DTN, "JOINS_AT = 10", "JOINS_AT = 9", "the class token of DTN's baselines joins a block too early", T),
    (DTN, "return whole and not biased and", "return whole and", "networks with biases of q, k and v are DTN's", T),
    (DTN, "rows > 0 and int(rows**0.5) ** 2 == rows", "rows > 0", "a class token with a position joins late", T),
    (DTN, "{192: 4,", "{192: 3,", "DTN's smallest network has DeiT's heads", T),
    (TIMM, "if not contents.config and KEY not in contents.metadata and dtn", "if dtn",
     "a network that timm describes is read as DTN's", T),
    (SLAB, "(1 - left / total)", "(left / total)", "PRepBN's progress is what is left of it", T),
    (SLAB, "begun = warm is None or not warm > 0", "begun = True", "PRepBN's warm-up counts as progress", T),
    (SLAB, "return torch.tensor(1.0)", "return torch.tensor(0.0)", "RepBN alone is read as LayerNorm", T),
    (SLAB, "class_slot=True", "class_slot=False", "positions of SLAB's DeiTs begin with the first patch", T),
    (SLAB, "eps=1e-5", "eps=1e-6", "SLAB's networks have LayerNorm's eps", T),
    (SLAB, "dropped=list(counters)", "dropped=[]", "counters are dropped in silence", T),
    (TIMM, '    if _norms_inside(state):\n        checkpoint.placement', "    if False:\n        checkpoint.placement",
     "BEiT-3's norms inside are not seen in a bare file", D),
    (TIMM, 'in state or checkpoint.placement == "subln":', "in state:", "a bare BEiT-3 has timm's usual eps", D),
    (TIMM, 'elif checkpoint.placement == "subln":', "elif False:", "a bare BEiT-3 has a mean of one half", D),
    (TIMM, '        checkpoint.pool = "gap"\n', "        pass\n", "BEiT-3 pools by its class token", D),
    (TIMM, "    if attention != mlp:\n", "    if False:\n", "a norm inside attention alone is taken for Sub-LN", D),
    (TIMM, "any(norms_inside) and not all(norms_inside)", "False",
     "a described network with one norm inside is taken for Sub-LN", D),
    (TIMM, 'NormOptions(post="branch")', "NormOptions()", "norms behind a branch stand behind the sum", D),
    (FOLD, "bias + (weight * shift).sum((1, 2, 3))", "bias + (weight * scale * shift).sum((1, 2, 3))",
     "the first norm's shift is scaled once more", B),
    (FOLD, '"(p q c) -> c p q"', '"(c p q) -> c p q"', "scales of the first norm are put to other pixels", B),
    (FOLD, "model.pos_embed.copy_(model.pos_embed.double() * scale)", "pass",
     "positions before a norm keep their size", B),
    (FOLD, "layer.bias.double() + weight @ shift", "layer.bias.double() + (weight * scale) @ shift",
     "a shift before a layer is scaled once more", B),
    (FOLD, "layer.bias.double() * scale + shift", "layer.bias.double() + shift",
     "the bias before a norm is not scaled", B),
    (FOLD, "if not error <= TOLERANCE:", "if False:", "a folded file that computes something else is written", B),
    (FOLD, ".repeat_interleave(", ".repeat(", "heads' scales are dealt out channel by channel", B),
    (FOLD, "if half.post and not half.on_branch:", "if False:", "a norm of the residual stream is folded", B),
    (FOLD, "class_token_at=options.class_token_at)", "class_token_at=None)",
     "a folded network's class token joins at the start", B),
]  # fmt: skip
