"""Runs the command line: `python -m weighbridge.deployments.cli`."""

import sys

from weighbridge.deployments.cli import main

if __name__ == "__main__":
    sys.exit(main())
