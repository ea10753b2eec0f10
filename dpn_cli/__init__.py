"""Fine-tune Dual PatchNorm Vision Transformers (arXiv 2302.01327) on downstream tasks."""

__version__ = "0.2.0"
