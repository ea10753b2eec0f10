"""Fine-tune Dual PatchNorm Vision Transformers (arXiv 2302.01327) on downstream tasks.

The names below are the public interface for Python; they are imported when they are used. All else may change.
"""

import importlib
from typing import Any

__version__ = "0.2.0"
__all__ = ["__version__", "load_backbone", "load_classifier", "load_lit", "load_segmenter"]

_MODULES = {
    "load_backbone": "dpn_cli.weights.backbone",
    "load_classifier": "tasks.classify.classifier",
    "load_lit": "tasks.lit.towers",
    "load_segmenter": "tasks.segment.artifact",
}


def __getattr__(name: str) -> Any:
    """Import a public name. Raises `ImportError` where another module named ``tasks`` hides this package's."""
    if name not in _MODULES:
        raise AttributeError(f"module 'dpn_cli' has no attribute {name!r}; public are {', '.join(__all__)}")
    try:
        return getattr(importlib.import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        other = importlib.import_module("tasks").__file__ if "'tasks'" in str(error) else None
        if other is None:
            raise
        raise ImportError(
            f"{other} hides the package 'tasks' of dpn-cli; rename it, or start from another folder"
        ) from error


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
