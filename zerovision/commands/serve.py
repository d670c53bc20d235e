"""Serve one model as a page on this machine: drop an image, see its labels and what spoke for the first.

python scripts/serve.py digits                       # prints the address; Ctrl-C ends it
python scripts/serve.py model.safetensors --port 0   # a free port

It listens on 127.0.0.1 alone unless --host says otherwise; there is no password.
"""

from __future__ import annotations

import argparse
import sys

from zerovision.delivery.flags import LARGEST_TOP_K, add_max_megapixels
from zerovision.training.config.command_line import OneLineParser, run_script


def serve(given: argparse.Namespace) -> int:
    """Answer until Ctrl-C."""
    from zerovision.delivery.trained_model import find_model

    find_model(given.model)  # before the slow imports
    from zerovision.extras.serve import make_server

    asked = {"top_k": given.top_k, "device": given.device or "", "max_megapixels": given.max_megapixels}
    with make_server(given.model, given.host, given.port, **asked) as server:
        if not server.is_local:
            print("note: whoever reaches this address can use the page: there is no password", file=sys.stderr)
        print(f"page         {server.address}", flush=True)
        server.serve_forever()
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("serve", __doc__)
    parser.add_argument("model", metavar="RUN_OR_WEIGHTS", help="A run's name or folder, or a safetensors file.")
    parser.add_argument(
        "--host", default="127.0.0.1", help="Address or name to listen on; default: this machine alone."
    )
    parser.add_number("--port", 0, 65535, default=8000, help="Port to listen on; 0: a free one.")
    parser.add_number("--top-k", 1, LARGEST_TOP_K, default=5, help="Labels for each image.")
    parser.add_choice("--device", ("cpu", "cuda"), help="Default: a GPU if there is one.")
    add_max_megapixels(parser)
    return parser.parse(arguments)


def main() -> int:
    """Run the command line and return the exit code."""
    return run_script("serve", parse, serve)


if __name__ == "__main__":
    sys.exit(main())
