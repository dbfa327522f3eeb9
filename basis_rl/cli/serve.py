"""``basis-rl serve MODEL``."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from basis_rl.cli.main import report
from basis_rl.cli.options import serve_parser


def main(argv: Sequence[str]) -> int:
    """Serve until a signal arrives or the server ends by itself."""
    from basis_rl.engine.server import Server, ServerError, ServerOptions

    known, extra = serve_parser().parse_known_args(list(argv))
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
