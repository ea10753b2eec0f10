"""The options that only `dpn lit` has, or has with another meaning or default."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dpn_cli.arch import SIZES
from dpn_cli.options import DATA, MODEL, OUTPUT, RUNTIME, TRAIN


def _option(panel: str, *names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)


TextSize = Annotated[
    str | None,
    _option(MODEL, "--text-size", help=f"Text tower: {', '.join(SIZES)}. \\[default: the image tower's]"),
]
TokenizerOption = Annotated[
    str | None,
    _option(MODEL, "--tokenizer", help="A SentencePiece .model file. \\[default: open_clip's byte-pair encoding]"),
]
DataOption = Annotated[
    str | None,
    _option(
        DATA,
        "--data",
        help="Captioned images: a .csv or .tsv (file, caption), COCO's captions .json, a folder with NAME.txt beside "
        "each picture, wds:PATTERN, hf:OWNER/NAME\\[:CONFIGURATION], or demo. \\[default: demo]",
    ),
]
ValData = Annotated[
    str | None,
    _option(DATA, "--val-data", help="Other captioned images to score retrieval on. \\[default: --data's]"),
]
ValFraction = Annotated[
    float | None,
    _option(
        DATA, "--val-fraction", help="Share held out where there are no others. \\[default: 0.01, 50 to 5000 images]"
    ),
]
Images = Annotated[
    str | None,
    _option(DATA, "--images", help="Folder that the file names are relative to. \\[default: the table's]"),
]
CaptionColumn = Annotated[
    str | None,
    _option(DATA, "--caption-column", help="Column with the sentences. \\[default: caption, text, title or the like]"),
]
SkipBad = Annotated[
    bool | None,
    _option(
        DATA,
        "--skip-bad-images",
        help="Leave unreadable images and pairs without text out and count them. \\[default: no]",
    ),
]
CacheOption = Annotated[
    bool | None,
    _option(DATA, "--cache/--no-cache", help="Encode every image once, or at every visit. \\[default: --cache]"),
]
CacheDir = Annotated[
    str | None, _option(DATA, "--cache-dir", help="Folder of all caches. \\[default: cache/lit in $DPN_HOME]")
]
Views = Annotated[
    int | None,
    _option(
        DATA, "--views", help="Augmented views per image (random cut, mirrored); 0: the plain image. \\[default: 0]"
    ),
]
Loss = Annotated[str | None, _option(TRAIN, "--loss", help="softmax (CLIP's, LiT's) or siglip. \\[default: softmax]")]
Lr = Annotated[float | None, _option(TRAIN, "--lr", help="Peak learning rate. \\[default: 1e-3]")]
Seed = Annotated[int | None, _option(TRAIN, "--seed", help="Of order, captions, views and text tower. \\[default: 0]")]
Steps = Annotated[int | None, _option(TRAIN, "--steps", help="Optimizer steps. \\[default: 55000]")]
BatchSize = Annotated[
    int | None,
    _option(TRAIN, "--batch-size", "-b", help="Pairs per optimizer step over all ranks. \\[default: 16384]"),
]
MicroBatch = Annotated[
    str | None,
    _option(
        RUNTIME,
        "--micro-batch-size",
        help="Texts per forward pass, or auto; the loss is that of the whole batch all the same. \\[default: auto]",
    ),
]
CacheResume = Annotated[
    bool, _option(OUTPUT, "--resume", help="Taken for the sake of scripts: a stopped cache goes on in any case.")
]
Run = Annotated[str, typer.Argument(help="A run's folder, an export's, or its weights.safetensors.")]
Top = Annotated[int, typer.Option("--top", "-k", min=1, help="How many to print.")]
Pictures = Annotated[list[Path], typer.Argument(help="Pictures, or folders of pictures.")]
RunTokenizer = Annotated[
    str | None,
    _option(MODEL, "--tokenizer", help="Only a check: another file than the run's is refused. \\[default: the run's]"),
]
EvalData = Annotated[
    str,
    _option(
        DATA,
        "--data",
        help="Labelled images (folder with val/CLASS or CLASS, hf:OWNER/NAME\\[:CONFIGURATION], wds:PATTERN, demo), or "
        "captioned ones (.csv, .tsv, .json; with --retrieval the other kinds of 'lit train' too).",
    ),
]
Split = Annotated[
    str | None,
    _option(
        DATA,
        "--split",
        help="train, val, test or all. \\[default: val, which of a run's own pairs are those that it held out]",
    ),
]
Retrieval = Annotated[bool, _option(DATA, "--retrieval", help="Read --data as captioned images and score retrieval.")]
Prompts = Annotated[
    str | None,
    _option(
        MODEL,
        "--prompts",
        help="clip_paper (81 templates), clip_best (8), plain, or a file, one a line. \\[default: clip_paper]",
    ),
]
ClassNames = Annotated[
    str | None,
    _option(
        DATA,
        "--class-names",
        help="imagenet, or a file with a name per class. \\[default: open_clip's for ImageNet's folders, else the "
        "folders' own]",
    ),
]
Force = Annotated[bool, _option(DATA, "--force", help="Print an accuracy that is not above chance.")]
AtOnce = Annotated[int, typer.Option("--batch-size", "-b", min=1, help="Images at a time.", rich_help_panel=RUNTIME)]
ResultDir = Annotated[
    Path | None, typer.Option("--output-dir", "-o", help="Folder for result.json.", rich_help_panel=OUTPUT)
]
Labels = Annotated[str, _option(MODEL, "--labels", help="What the pictures may show, comma separated.")]
PredictPrompts = Annotated[
    str, _option(MODEL, "--prompts", help="As for eval: plain takes the labels as they are. \\[default: plain]")
]
SearchFolder = Annotated[Path, _option(DATA, "--images", help="Folder of pictures.")]
Query = Annotated[str, _option(MODEL, "--query", help="What to look for, a sentence.")]
ExportDir = Annotated[Path, typer.Option("--output-dir", "-o", help="Folder for towers, description and card.")]
