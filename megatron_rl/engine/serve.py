"""vLLM's OpenAI server in this process."""

import os
from collections.abc import Sequence

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from megatron_rl.engine.lifetime import end_with_server
from megatron_rl.engine.plugin import register


def serve(arguments: Sequence[str]) -> None:
    """Runs until a signal ends it."""
    os.register_at_fork(after_in_child=end_with_server)
    register()
    parser = make_arg_parser(FlexibleArgumentParser())
    options = parser.parse_args(list(arguments))
    assert options is not None, "vLLM's parser gives a namespace"
    validate_parsed_serve_args(options)
    uvloop.run(run_server(options))
