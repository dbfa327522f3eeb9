"""``basis-rl serve MODEL``."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Sequence

from basis_rl.cli.main import report


def parser() -> argparse.ArgumentParser:
    """The options; whatever it does not know is vLLM's."""
    result = argparse.ArgumentParser(
        prog="basis-rl serve",
        description="Start a vLLM server as training needs it, wait until it is healthy, and stop it cleanly on Ctrl-C "
        "or SIGTERM. Unknown options are handed to vLLM (--tensor-parallel-size 4, --gpu-memory-utilization 0.9).",
    )
    result.add_argument("model", help="Hub id or folder")
    result.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on; whoever reaches it can change the weights, so open it in a private network only",
    )
    result.add_argument("--port", type=int, default=8000)
    result.add_argument("--dtype", default="auto", help="precision of the weights: that of the training")
    result.add_argument("--max-model-len", type=int, default=None, help="prompt and completion together, in tokens")
    return result


def main(argv: Sequence[str]) -> int:
    """Serve until a signal comes, or the server ends by itself."""
    from basis_rl.rollout.server import Server, ServerError, ServerOptions

    known, extra = parser().parse_known_args(list(argv))
    options = ServerOptions(known.model, known.host, known.port, known.dtype, known.max_model_len, extra=extra)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, also while the model is loading
    try:
        server = Server(options)
        print(f"Starting vLLM with {known.model} ...", flush=True)
        with server:
            print(
                f"Ready at {server.url}. Train against it with\n  basis-rl train RECIPE.yaml --use_vllm true "
                f"--vllm_mode server --vllm_server_base_url {server.url}",
                flush=True,
            )
            while True:
                time.sleep(1.0)
                if server.process is None or server.process.poll() is not None:
                    raise ServerError("The vLLM server ended by itself; see its output above.")
    except ServerError as error:
        return report(error)
    except KeyboardInterrupt:
        print("Stopped.", flush=True)
        return 0
