"""What it costs to load a ViT-B/16, beside reading the same file with its own library; seconds and peak memory.

    python benchmarks/loading.py

Every measurement runs in a process of its own, after its imports; the peak is the resident memory above that.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 5
PREPARE = """
import sys, numpy as np, timm, torch
from dpn_cli.weights.backbone import export_backbone, load_backbone
folder = sys.argv[1]
model = load_backbone("B/16", num_classes=1000)
export_backbone(model, __import__("pathlib").Path(folder) / "ours.safetensors")
state = timm.create_model("vit_base_patch16_224").state_dict()
torch.save(state, f"{folder}/timm.pth")
shapes = {"ln0/scale": (768,), "ln0/bias": (768,), "dense/kernel": (768, 768), "dense/bias": (768,),
          "ln1/scale": (768,), "ln1/bias": (768,), "cls": (1, 1, 768), "pos_embedding": (1, 196, 768),
          "Transformer/encoder_norm/scale": (768,), "Transformer/encoder_norm/bias": (768,),
          "head/kernel": (768, 1000), "head/bias": (1000,)}
for block in range(12):
    inside = {"LayerNorm_0/scale": (768,), "LayerNorm_0/bias": (768,), "LayerNorm_1/scale": (768,),
              "LayerNorm_1/bias": (768,), "MlpBlock_0/Dense_0/kernel": (768, 3072), "MlpBlock_0/Dense_0/bias": (3072,),
              "MlpBlock_0/Dense_1/kernel": (3072, 768), "MlpBlock_0/Dense_1/bias": (768,),
              "MultiHeadDotProductAttention_0/out/kernel": (12, 64, 768),
              "MultiHeadDotProductAttention_0/out/bias": (768,)}
    for part in ("query", "key", "value"):
        inside[f"MultiHeadDotProductAttention_0/{part}/kernel"] = (768, 12, 64)
        inside[f"MultiHeadDotProductAttention_0/{part}/bias"] = (12, 64)
    shapes |= {f"Transformer/encoderblock_{block}/{name}": shape for name, shape in inside.items()}
generator = np.random.default_rng(0)
arrays = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
np.savez(f"{folder}/big_vision.npz", **arrays)
"""
MEASURE = """
import json, resource, sys, time
import numpy as np, torch
from safetensors.torch import load_file
import dpn_cli.weights.backbone
kind, path = sys.argv[1:]
def raw():
    if path.endswith(".npz"):
        with np.load(path) as arrays:
            return {name: arrays[name] for name in arrays.files}
    return load_file(path) if path.endswith(".safetensors") else torch.load(path, weights_only=True)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before, start = peak(), time.perf_counter()
if kind == "raw":
    loaded = {name: value.sum() for name, value in raw().items()}  # touched: safetensors maps the file and reads later
else:
    loaded = dpn_cli.weights.backbone.load_backbone(checkpoint=path, stem=None)
print(json.dumps([time.perf_counter() - start, peak() - before]))
"""


def measure(kind: str, path: Path) -> tuple[float, float]:
    """Return the median seconds and the largest peak in bytes over `RUNS` processes."""
    results = []
    for _ in range(RUNS):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, kind, str(path)], capture_output=True, text=True, check=True
        )
        results.append(json.loads(done.stdout))
    return sorted(seconds for seconds, _ in results)[RUNS // 2], max(peak for _, peak in results)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", PREPARE, folder], check=True)
        for path in sorted(Path(folder).iterdir()):
            size = path.stat().st_size
            raw_seconds, raw_peak = measure("raw", path)
            seconds, peak = measure("dpn", path)
            print(
                f"{path.name:18s} {size / 2**20:5.0f} MiB  raw {raw_seconds:.2f} s, {raw_peak / size:.2f} x file   "
                f"dpn {seconds:.2f} s ({seconds - 1.2 * raw_seconds:+.2f} s over 1.2 x raw), {peak / size:.2f} x file"
            )
