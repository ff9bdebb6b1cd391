"""vLLM's OpenAI server in this process."""

from collections.abc import Sequence

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from megatron_rl.engine.plugin import register


def serve(arguments: Sequence[str]) -> None:
    """Runs until a signal ends it."""
    register()
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args(list(arguments))
    validate_parsed_serve_args(options)
    uvloop.run(run_server(options))
