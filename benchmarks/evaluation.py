"""Peak memory of scoring a classifier on few and on many images, each measurement in a process of its own.

python benchmarks/evaluation.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from loader import write_images

FEW, MANY = 500, 5000
MEASURE = """
import json, resource, sys
from pathlib import Path
import torch
from dpn_cli.weights.backbone import load_backbone
from tasks.classify.classifier import Classifier, compute_logits
from dpn_cli.data.sources.base import Part
from dpn_cli.data.sources.folder import ClassFolders
from dpn_cli.run.distributed import World
from dpn_cli.metrics import score
count = int(sys.argv[2])
model = load_backbone("mu/16", image_size=64, num_classes=4).eval()
classifier = Classifier(model, ("a", "b", "c", "d"), "softmax", 73, {})
images = ClassFolders(Path(sys.argv[1]))
split = Part(images, [row % len(images.labels) for row in range(count)])
world = World(0, 1, torch.device("cpu"))
scores = score(lambda x: compute_logits(classifier, x), split, classifier.transform, 4, world, loss="softmax",
               batch_size=64, workers=0)
assert scores.images == count
print(json.dumps(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss))
"""

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), (500, 375), 64)
        for count in (FEW, MANY):
            command = [sys.executable, "-c", MEASURE, folder, str(count)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{count} images: {json.loads(done.stdout) / 2**10:.0f} MiB at most, PyTorch included")
