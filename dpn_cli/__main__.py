"""The entry point of ``dpn`` and of ``python -m dpn_cli``."""

import signal
import sys
from pathlib import Path

if __name__ == "__main__" and not sys.flags.safe_path and sys.path[0] != str(Path(__file__).parents[1]):
    # Python puts the working directory first, and a stranger's tasks.py may lie there.
    sys.path.append(sys.path.pop(0))

try:
    from dpn_cli.cli import main
except KeyboardInterrupt:  # a traceback through a fifth of a second of imports tells nobody anything
    print("error: interrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)

if __name__ == "__main__":
    main()
