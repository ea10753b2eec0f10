"""Breakages of trainings at once: (file, text, replacement, what it breaks, tests that should notice)."""

SLURM, NODE, RAY = (f"dpn_cli/jobs/{name}.py" for name in ("slurm", "node", "ray_cluster"))
E = "tests/test_engines.py"
L, S = "tests/test_leases.py", "tests/test_joining.py"
LEASES, SWEEP, ONE = "dpn_cli/run/leases.py", "tasks/vtab/sweep.py", "tasks/vtab/one_task.py"
J, C, R = "tests/test_jobs.py", "tests/test_comparison_jobs.py", "tests/test_reproduce_runs.py"
ORDER, PROCESSES = "dpn_cli/jobs/scheduler.py", "dpn_cli/jobs/processes.py"
RUN, COMPARED = (f"dpn_cli/commands/{name}.py" for name in ("reproduce/run", "comparison"))

MUTATIONS = [
    (ORDER, "if not open_.intersection(work.after)]", "]", "work begins before what it needs", J),
    (ORDER, "{*waiting, *running, *lost}", "{*waiting, *running}", "work begins though what it needs has failed", J),
    (ORDER, "ready[: len(free)]", "ready[: len(free) + 1]", "more work runs than there are slots", J),
    (ORDER, "                free.append(slot)\n", "", "a slot is used once", J),
    (ORDER, "        if running:\n            backend.stop()\n", "        pass\n", "a signal leaves processes behind", J),
    (ORDER, "free.pop(0)", "free.pop()", "one GPU gets all work that comes in turn", J),
    (PROCESSES, "share = len(mine) // self.slots", "share = len(mine)", "every process has all cores", J),
    (PROCESSES, "self.gpus[slot % len(self.gpus)]", "self.gpus[0]", "every process has the first GPU", J),
    (PROCESSES, "{**os.environ, PARENT: str(os.getpid())}", "{**os.environ}", "processes that share cores are not told who began them",
     J),
    (PROCESSES, "process.send_signal(signal.SIGTERM)", "process.kill()", "a stopped process cannot save its state", J),
    (PROCESSES, "    os.sched_setaffinity(0, chosen)\n    try:", "    try:", "processes compete for the same cores", J),
    ("dpn_cli/run/cores.py", "sorted(os.sched_getaffinity(0))", "list(range(os.cpu_count() or 1))",
     "cores that others have been given are counted", J),
    (PROCESSES, 'given.split(",") if given else', "[] if given else", "GPUs that are set aside are not found", J),
    (PROCESSES, "(told or lines or", "(lines or", "the reason of a failure is what was printed last", J),
    ("dpn_cli/run/process.py", "if os.getppid() != int(parent):", "if False:", "a process whose parent has died begins", J),
    (RUN, "(job.start.name,) if job.start else ()", "()", "trainings in processes begin before what they start from", R),
    (COMPARED, "if code in (NonFiniteError.exit_code, OutOfMemoryError.exit_code):", "if code:",
     "a mistake in a process lets the others go on", C),
    (COMPARED, "            if run.folder in failed:\n", "            if False:\n", "what failed in a process is trained here", C),
    (LEASES, "os.O_CREAT | os.O_EXCL", "os.O_CREAT", "two processes take over from a dead one", L),
    (LEASES, "or lives is not None", "or False", "a process that was killed is waited for", L),
    (LEASES, "self._lost or self._leases.newest(self.name) != self._number", "self._lost", "an owner does not notice that it has lost",
     L),
    (LEASES, "return self.clock() - since >= PATIENCE", "return False", "what a dead machine had is never done", L),
    (LEASES, "if before != content:", "if before is None:", "an owner that beats is taken for dead", L),
    (ONE, "            if not self._ended(cell):  # another", "            if True:  # another", "a training that another has done meanwhile is done again", S),
    (ONE, "        if not self._all_ended(cells):\n            return\n", "", "the learning rate is chosen before others have ended", S),
    ("dpn_cli/run/folder.py", "                folder._same_version()\n", "", "another version works along", S),
    ("tasks/vtab/cells.py", "    except FileNotFoundError:\n        return None\n    except",
     "    except FileNotFoundError:\n        value = {} if path.is_file() else None\n        if value is None:\n            return None\n    except",
     "a file is looked for twice, and another process writes it in between", S),
    (SWEEP, "asked = all_parts if place.cell is None else [all_parts[place.cell]]", "asked = all_parts", "--cell does everything", S),
    (SWEEP, "        _forget_failures(folder)\n", "", "--jobs never tries again what failed", S),
    (SLURM, "return code == StoppedError(signal.SIGTERM).exit_code and", "return False and", "a job that was told to stop is taken for failed", E),
    (SLURM, "node.save_and_end(self.process, signal.SIGUSR1)", "pass", "a job that is preempted cannot save its state", E),
    (NODE, "{path.stat().st_size}", "", "a node with other files at the same names is taken", E),
    (NODE, "os.waitid(", "(lambda *_: None)(", "a job is queued again before its state is saved", E),
    (RAY, "if not done and not any(", "if False and not any(", "a command whose node of the cluster is lost waits for ever", E),
    ("dpn_cli/data/pack.py", "processes[:] = pool._processes.values()", "processes[:] = multiprocessing.active_children()",
     "packing waits for ever when a worker dies at its start", "tests/test_processes.py"),
    (RAY, "and self._lost < AGAIN", "and False", "the work of a lost node is not done", E),
    ("dpn_cli/data/decoded.py", "        if not rest.is_file():\n", "        if True:\n", "every process decodes for itself", S),
    ("tasks/vtab/sweep.py", "        shutil.rmtree(pixels, ignore_errors=True)\n", "        pass\n", "shared pixels stay behind", S),
]  # fmt: skip
