#!/usr/bin/env python
"""Average Hugging Face checkpoints of one model into one.

A piece of one tensor is in memory at a time; FP8 weights are dequantised first.
    python tools/soup.py SOURCE SOURCE ... TARGET [--weights .7,.3]
"""

import sys

from megatron_rl.cli.main import app
from megatron_rl.cli.user_errors import run_with_user_errors

if __name__ == "__main__":
    sys.exit(run_with_user_errors(lambda: app(["soup", *sys.argv[1:]], prog_name="tools/soup.py")))
