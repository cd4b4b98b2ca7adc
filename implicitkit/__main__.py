"""``python -m implicitkit``: see :mod:`implicitkit.cli.commands`."""

import sys

from implicitkit.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
