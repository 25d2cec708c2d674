"""Runs the command line: `python -m weighbridge.deployments.cli`."""

import sys

from weighbridge.deployments.cli import main

sys.exit(main())
