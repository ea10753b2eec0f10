"""The entry point of ``dpn`` and of ``python -m dpn_cli``."""

import signal
import sys

try:
    from dpn_cli.cli import main
except KeyboardInterrupt:  # a traceback through a fifth of a second of imports tells nobody anything
    print("error: interrupted", file=sys.stderr)
    sys.exit(128 + signal.SIGINT)

if __name__ == "__main__":
    main()
