from dpn_cli.weights.backbone import load_backbone as load_backbone
from tasks.classify.classifier import load_classifier as load_classifier
from tasks.lit.towers import load_lit as load_lit
from tasks.segment.artifact import load_segmenter as load_segmenter

__version__: str
__all__ = ["__version__", "load_backbone", "load_classifier", "load_lit", "load_segmenter"]
