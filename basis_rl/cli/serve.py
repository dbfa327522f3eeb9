"""``basis-rl serve MODEL``."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from basis_rl.cli.main import report
from basis_rl.cli.options import serve_parser
from basis_rl.recipe.words import peek


def _check_model(name: str, extra: Sequence[str]) -> None:
    """Refuse a model that is neither a local folder nor on the Hub. vLLM takes half a minute to report that."""
    from transformers.utils.hub import cached_file

    found = None
    why = "it has no config.json"
    try:
        found = cached_file(name, "config.json", revision=peek(extra, ["revision"])[0].get("revision"))
    except (OSError, ValueError) as error:
        why = str(error).strip().splitlines()[0]
    if found is None:
        raise ValueError(f"'{name}' cannot be served: {why}")


def main(argv: Sequence[str]) -> int:
    """Serve until a signal arrives or the server ends by itself."""
    from basis_rl.engine.server import Server, ServerError, ServerOptions

    known, extra = serve_parser().parse_known_args(list(argv))
    _check_model(known.model, extra)
    limits = {"max_model_len": known.max_model_len, "max_lora_rank": known.max_lora_rank}
    options = ServerOptions(known.model, known.host, known.port, known.dtype, **limits, extra=extra)
    # SIGTERM acts like Ctrl-C, even while the model is loading.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        server = Server(options)
        print(f"Starting vLLM with {known.model} ...", flush=True)
        with server:
            print(
                f"Ready at {server.url}. Train against it with\n  basis-rl train RECIPE.yaml --use_vllm true "
                f"--vllm_mode server --vllm_server_base_url {server.url}",
                flush=True,
            )
            assert server.process is not None, "a server that is ready has a process"
            server.process.wait()
            raise ServerError("The vLLM server ended by itself; see its output above.")
    except ServerError as error:
        return report(error)
    except KeyboardInterrupt:
        print("Stopped.", flush=True)
        return 0
