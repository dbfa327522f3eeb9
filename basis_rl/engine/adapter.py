"""A LoRA policy on a vLLM server as an adapter beside the base model, in place of merged weights."""

from __future__ import annotations

import json
import re
import shutil
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from basis_rl.engine.client import Client
from basis_rl.engine.weights import whole
from basis_rl.run.errors import RequestRefused, RolloutError, WrongAnswer

_PREFIX = "basis-lora-"
# Versions that stay loaded, the last one included: requests that began under an older one may still be running.
_KEPT = 4
# A random adapter changes the log-probabilities of a probe by far more than this.
_LEAST_EFFECT = 1e-3
# Values of `init_lora_weights` that leave the base model's weights as they are.
_KEEP_BASE = (True, False, "gaussian", "orthogonal")
# Changes of the probe that are not larger than so many times the error of the last sync are not judged.
_CLEAR = 4.0


def lora_missing(client: Client) -> str | None:
    """What to start, if this server cannot load adapters while it runs; None if it can."""
    with suppress(RequestRefused, KeyError, TypeError):
        if client.ask("/server_info?config_format=json")["vllm_config"]["lora_config"]:
            try:
                client.ask("/v1/unload_lora_adapter", {"lora_name": ""})
            except RequestRefused as error:
                # It asks for a name. Where adapters cannot be loaded, the address does not exist.
                if "(HTTP 400)" in str(error):
                    return None
    return (
        f"The vLLM server at {client.url} cannot load adapters (vllm_lora_sync: adapter). Start it with "
        "`basis-rl serve MODEL --max-lora-rank R`, where R is at least the rank of the adapter, or set "
        "vllm_lora_sync: merged."
    )


class PolicyAdapter:
    """The trained adapter of a PEFT model, as vLLM reads it: ``W + B A`` with the scaling in ``B``.

    vLLM knows one scaling per adapter, ``lora_alpha / r``, and does not read ``alpha_pattern`` and ``rank_pattern``.
    Here each layer's ``B`` is multiplied by that layer's own scaling, and the configuration has ``lora_alpha = r``.

    Args:
        model: a PEFT model, which may be sharded.
        gather: context in which parameters of ZeRO-3 are whole.
        device: where parameters of FSDP2 are gathered.
    """

    def __init__(self, model: Any, gather: Callable[[Any], AbstractContextManager[None]], device: torch.device) -> None:
        self.model = model
        self.gather = gather
        self.device = device
        self.name = model.active_adapter

    def unsupported(self) -> str | None:
        """Why vLLM would serve another policy without a word; None if it would not. What vLLM refuses is asked of
        vLLM (`ServedAdapters.unsupported`)."""
        config = self.model.peft_config[self.name]
        start = getattr(config, "init_lora_weights", True)
        if config.peft_type != "LORA":
            return f"it is not of the type LORA, but {config.peft_type}"
        if start not in _KEEP_BASE:
            return f"init_lora_weights: {start} may change the base model, of which the server has the original"
        if any(getattr(module, "lora_variant", None) for module in self.model.modules()):
            return "its layers compute more than B A (DoRA, aLoRA)"
        return None

    def config(self) -> dict[str, Any]:
        """The content of adapter_config.json."""
        config = self.model.peft_config[self.name]
        rank = max([config.r, *config.rank_pattern.values()])
        same = {"r": rank, "lora_alpha": rank, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
        return {**config.to_dict(), **same}

    def shapes(self) -> dict[str, list[int]]:
        """Of the whole tensors, by vLLM's names. Not collective."""
        # ZeRO-3 leaves empty tensors, with the full shape in an attribute.
        return {self._served(name): list(getattr(each, "ds_shape", each.shape)) for name, each in self._parameters()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and whole tensors, one at a time. Collective where parameters are sharded."""
        for name, parameter in self._parameters():
            with self.gather([parameter]):
                module, _, part = name.rpartition(".lora_")
                scaled = part.startswith(("B", "embedding_B"))
                factor = self.model.get_submodule(module).scaling[self.name] if scaled else 1.0
                yield self._served(name), whole(parameter, self.device).float() * factor

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The adapter's, and whatever else is trained: vLLM refuses what it does not know."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or (".lora_" in name and f".{self.name}" in name):
                yield name, parameter

    def _served(self, name: str) -> str:
        return name.replace(f".{self.name}", "").replace("_checkpoint_wrapped_module.", "")


class ServedAdapters:
    """The versions of an adapter on a server, each under a name of its own, of which the client asks the last.

    vLLM caches adapters and prompts by the adapter's name, so a name that had new weights would be answered with old
    ones.

    Args:
        client: a `basis_rl.engine.training_client.TrainingClient`.
    """

    def __init__(self, client: Any) -> None:
        self.client = client
        self.names: list[str] = []
        self.own = f"{_PREFIX}{uuid.uuid4().hex[:8]}-"

    def send(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write the next version, let the server load it, and ask for it from now on.

        Raises:
            RolloutError: the server failed, or refuses it (HTTP 500).
            WrongAnswer: it says that it has loaded the adapter, and does not list it.
        """
        client = self.client
        client.version += 1
        client.hold(client.version)
        name = f"{self.own}{client.version}"
        folder = client.folder / name
        self.names.append(name)
        folder.mkdir(parents=True)
        save_file(
            {key: value.cpu().contiguous() for key, value in tensors.items()}, folder / "adapter_model.safetensors"
        )
        (folder / "adapter_config.json").write_text(json.dumps(config, default=list))
        self._ask("load", lora_name=name, lora_path=str(folder))
        if name not in client.server.model().names:
            raise WrongAnswer(
                f"The vLLM server at {client.base_url} has loaded the adapter {name}, but does not list it."
            )
        client.model = name
        self.drop(_KEPT)

    def unsupported(
        self, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], probe: list[int]
    ) -> str | None:
        """Why this server cannot serve such an adapter, found by trying; None if it can.

        A fresh adapter has B = 0, so that the policy's own probe would not show that it is ignored. So for each kind of
        layer an adapter of random numbers, as large as the weights, is loaded; it must change the probe, and to
        something else than the adapters before.
        """
        client = self.client
        client.hold(client.version)
        self.clear()
        if any(state["merged"] for state in client.rpc("basis_state")):
            return "merged weights were sent to this server before, in place of the base model's; restart it"
        kinds: dict[str, list[str]] = defaultdict(list)
        for name in shapes:
            kinds[re.sub(r"\.\d+\.", ".*.", name.partition(".lora_")[0])].append(name)
        seen = [client.prompt_log_probs(probe)]
        drawn = torch.Generator().manual_seed(0)
        try:
            for kind, names in kinds.items():
                self.send(config, {n: torch.randn(*shapes[n], generator=drawn) / shapes[n][-1] ** 0.5 for n in names})
                found = client.prompt_log_probs(probe)
                if min(float((found - each).abs().max()) for each in seen) < _LEAST_EFFECT:
                    return f"the server ignores the adapter of {kind}"
                seen.append(found)
        except (RolloutError, RequestRefused) as error:
            # vLLM refuses an adapter with HTTP 500, as if it had failed. It has not if it goes on.
            client.prove()
            if isinstance(error, RolloutError) and "HTTP 500" not in str(error):
                raise
            return str(error)
        finally:
            self.clear()
        return None

    def clear(self) -> None:
        """Unload every adapter of ours, also those of runs that were killed, and ask for the base model again."""
        base, *others = self.client.server.model().names
        self.client.model = base
        self.names = [name for name in others if name.startswith(_PREFIX)]
        self.drop(0)

    def drop(self, kept: int) -> None:
        """Unload all but the last versions, and remove their files."""
        count = max(0, len(self.names) - kept)
        dropped = self.names[:count]
        self.names = self.names[count:]
        # Without a version of ours it is that of another run, or one for merged weights.
        if dropped and not self.names:
            shutil.rmtree(self.client.folder, ignore_errors=True)
        for name in dropped:
            shutil.rmtree(self.client.folder / name, ignore_errors=True)
            # A server that was restarted does not know it.
            with suppress(RequestRefused):
                self._ask("unload", lora_name=name)

    def _ask(self, action: str, **body: str) -> None:
        url = f"{self.client.base_url}/v1/{action}_lora_adapter"
        # vLLM's answer is a sentence, not JSON. The session raises for every status but these.
        if self.client.session.request("POST", url, json=body).status_code == 404:
            raise RequestRefused(f"The vLLM server at {self.client.base_url} does not {action} adapters (HTTP 404).")


class Following:
    """Whether the engine follows the policy, also where each error is below the tolerance.

    With the probe's log-probabilities by engine and trained model at an earlier sync, s0 and t0, and now, s and t::

        c = <s - s0, t - t0> / |t - t0|^2

    is 1 if the engine follows and 0 if it still serves the earlier policy; constant differences between the two (of
    precision) cancel. It is judged when ``|t - t0| > 4 |s0 - t0|``, so that it is not a ratio of rounding errors; until
    then the earlier sync stays the same one, and small changes add up. Of several servers, the one counts that follows
    least.
    """

    def __init__(self) -> None:
        self.before: tuple[Tensor, Tensor] | None = None

    def share(self, served: Tensor, trained: Tensor) -> float:
        """c; 1 if it cannot be judged yet."""
        if self.before is None:
            self.before = served, trained
            return 1.0
        moved = trained - self.before[1]
        rounding = max(float((self.before[0] - self.before[1]).norm()), 1e-5)
        if not float(moved.norm()) > _CLEAR * rounding:
            return 1.0
        share = float(((served - self.before[0]) @ moved).min() / (moved @ moved))
        self.before = served, trained
        return share
