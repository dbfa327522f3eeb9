"""``basis-rl serve MODEL``."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from basis_rl.cli.main import report
from basis_rl.cli.options import serve_parser


def _check_model(name: str, extra: Sequence[str]) -> None:
    """Refuse a model that is neither a local folder nor on the Hub. vLLM takes half a minute to report that."""
    if Path(name).is_dir():
        if not (Path(name) / "config.json").is_file():
            raise ValueError(f"The folder '{name}' holds no model: it has no config.json.")
        return
    from huggingface_hub import errors, hf_hub_download

    revision = next((b for a, b in pairwise(extra) if a == "--revision"), None)
    try:
        hf_hub_download(name, "config.json", revision=revision)
    except (errors.HfHubHTTPError, errors.HFValidationError, errors.LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ValueError(f"There is no folder '{name}', and as a Hub id it cannot be loaded: {reason}") from error


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
