"""Breakages of comparisons: (file, text, replacement, what it breaks, tests)."""

C = "tests/test_comparison.py"
RECIPE, RUN, TABLE = (f"dpn_cli/{name}.py" for name in ("recipe/compare", "commands/comparison", "commands/compared"))
LIT, CL = "tasks/lit/train.py", "tests/test_lit_comparison.py"
PROBES, OPTIONS, CF = "dpn_cli/commands/probing.py", "tasks/classify/options.py", "tests/test_fewshot_comparison.py"
STOPPING, RANKS, KINDS = "dpn_cli/run/stopping.py", "dpn_cli/run/distributed.py", "dpn_cli/run/kinds.py"

MUTATIONS = [
    (RECIPE, r',(?=\s*[\w.]+\s*=)', ",", "a comma ends every value", C),
    (RECIPE, 'plain[first] = {**section, rest: value} if rest else value', "plain[first] = value",
     "a key inside a section replaces the section", C),
    (RECIPE, "        if key in settings:\n", "        if False:\n", "the last of two values is taken in silence", C),
    (RECIPE, 'str(value).replace("/", "-")', "str(value)", "B/16 in a checkpoint's name is a folder", C),
    (RECIPE, 'f"{short}-{len(folders)}" if short in folders.values() else short', "short",
     "two networks share a folder", C),
    (RECIPE, "distinct(tuple(str(", "tuple(tuple(str(", "a network is compared with itself", C),
    (RECIPE, 'update={"seed": seed, "seeds": ()}', 'update={"seeds": ()}', "every training has the first seed", C),
    (RECIPE, "{**plain, \"backbone\": _with_own(self.backbone, name)}", '{**plain, "backbone": plain["backbone"]}',
     "every network is the recipe's", C),
    (RECIPE, 'if seeds and info.data.get("seed")', "if False", "--seed is dropped where --seeds is given", C),
    (TABLE, "for one in (ours, theirs))", "for one in (theirs, ours))", "the difference has the other sign", C),
    (TABLE, "[seed for seed in ours if seed in theirs]", "list(ours)",
     "a seed that failed is looked for in the pairs", C),
    (TABLE, "if any(value_of(one, key) is not None for one in results.values())]", "]",
     "a score that no training has is the headline", f"{C} {CL}"),
    (LIT, "views=recipe.cache.views, skip_bad", "views=recipe.cache.views, seed=recipe.seed, skip_bad",
     "every seed encodes its views again", CL),
    (PROBES, "cell.network == name and self._done(cell) is None]", "cell.network == name]",
     "draws that are there are done again", CF),
    (PROBES, "stem not in (None, model.config.stem)", "False", "a network is called by a stem that it does not have", CF),
    (PROBES, "        check_weights(self.folder, digests)\n", "", "draws of other weights are taken for the network's", CF),
    (PROBES, "except (NonFiniteError, OutOfMemoryError) as error", "except OutOfMemoryError as error",
     "one network's NaN ends the probes of all", CF),
    (OPTIONS, "list(weights.values()).count(weights[name]) > 1", "False", "a network is compared with itself", CF),
    (TABLE, "summary.stderr * math.sqrt(len(summary.values))", "summary.stderr", "the deviation is the standard error", C),
    (RUN, "Place(folder.path / run.folder, resume=True)", "Place(folder.path / run.folder, overwrite=True)",
     "a resumed comparison trains everything again", C),
    (TABLE, '    if result["failed"]:\n', "    if False:\n", "a comparison with a failure counts as finished", C),
    (RUN, "            except (NonFiniteError, OutOfMemoryError) as error:\n                if world",
     "            except OutOfMemoryError as error:\n                if world", "one NaN ends all trainings", C),
    (RUN, '        with named(run.network):\n            report', '        if True:\n            report',
     "an error does not say of which network it is", C),
    (RUN, "        if not recipe.compare:\n            several", "        if False:\n            several",
     "seeds alone take the folder of one training", C),
    (RUN, 'done["data"] != next', 'False and done["data"] != next', "networks are trained on different data", C),
    (TABLE, 'get("digests", digests)', 'get("", digests)', "seeds start from different weights", C),
    (STOPPING, "    if signal.getsignal(signal.SIGTERM) is _note:\n", "    if False:\n",
     "a signal at the end of a training does not stop the others", C),
    (RANKS, "    if dist.is_initialized():\n        yield World(rank, size, chosen)\n        return\n", "",
     "each training joins the ranks anew", C),
    (KINDS, '    if kind == "comparison":\n', "    if False:\n", "dpn eval does not say where the networks are", C),
]  # fmt: skip
