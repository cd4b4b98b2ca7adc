"""``python -m implicitkit``: see :mod:`implicitkit.cli`."""

import sys

from implicitkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
