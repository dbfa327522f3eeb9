"""What a training keeps in the memory of one GPU, from sizes alone: no tensor is made here.

Bytes throughout. ``T`` tokens of a micro-batch (rows x length), ``h`` hidden size, ``f`` intermediate size, ``q`` and
``k`` width of all query heads and of all key heads, ``W`` processes, ``c`` bytes of a number in computation, ``r`` of
one in the residual stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from basis_rl.trainer.head import BLOCK_ROWS, LEAST_ROWS, TILE_BYTES

# TRL's fused LM head works in tiles of so many tokens x vocabulary entries (`trl.kernels.chunked_logprob`).
HEAD_TILE = (4096, 32768)
# Float32 copies of what is turned to probabilities at a time: of TRL's tile on a CPU, and of a block in our head.
TILE_COPIES = 8
BLOCK_COPIES = 3
# DeepSpeed's defaults, in elements: what one bucket of gradients holds, what of the parameters may be gathered at a
# time, and of how many parameters the gradients are turned to float32 at a time.
REDUCE_BUCKET = 500_000_000
MAX_LIVE_PARAMETERS = 1_000_000_000
SUB_GROUP = 1_000_000_000

Engine = Literal["plain", "deepspeed", "fsdp"]
Scoring = Literal["padded", "packed", "shared"]
Phase = Literal["always", "backward", "step", "generation"]


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a decoder-only transformer (RMSNorm, gated MLP, grouped queries) determines its memory.

    Attributes:
        parameters: all of them, shared ones once, adapters included.
        trainable: those that are trained; adapters only with LoRA.
        trainable_tensors: how many tensors these are.
        layer_matrices: elements of the matrices in all layers, which autocast makes copies of.
        layers, hidden, intermediate, query, key_value, heads, vocabulary: the shape; query and key_value are widths.
        qk_norm: whether queries and keys are normalised (Qwen3).
    """

    parameters: int
    trainable: int
    trainable_tensors: int
    layer_matrices: int
    layers: int
    hidden: int
    intermediate: int
    query: int
    key_value: int
    heads: int
    vocabulary: int
    qk_norm: bool


@dataclass(frozen=True)
class Launch:
    """How `accelerate launch` would start a run.

    Attributes:
        world: processes.
        engine: ``plain`` is one process or DDP.
        stage: ZeRO's, 1 to 3; FSDP shards everything.
        offload_optimizer, offload_parameters: they are kept in the CPU's memory; FSDP offloads both or none.
        source: where this is known from, for messages.
    """

    world: int = 1
    engine: Engine = "plain"
    stage: int = 0
    offload_optimizer: bool = False
    offload_parameters: bool = False
    source: str = "this process"

    def __str__(self) -> str:
        name = {"plain": "DDP" if self.world > 1 else "no sharding", "fsdp": "FSDP"}.get(self.engine)
        return f"{name or f'DeepSpeed ZeRO-{self.stage}'} on {self.world} process(es), from {self.source}"


@dataclass(frozen=True, kw_only=True)
class Setting(Launch):
    """How it is trained, and on which processes.

    Attributes:
        low: bytes of a number in mixed precision, 2; 0 without.
        frozen_bytes, trainable_bytes: of a parameter as it is loaded.
        optimizer_states: numbers that the optimizer keeps for each trained one, in its own precision; None if unknown.
        rows, prompt, completion: of a micro-batch, in sequences and tokens; a budget of tokens is so many of the
            longest sequences.
        budgeted: there is such a budget, so that short prompts may leave it to completions.
        checkpointing: activations are computed again in the backward pass.
        attention: ``sdpa``, ``eager``, or a flash kernel's name, which needs no mask.
        accumulation: micro-batches an optimizer step.
        reference: a reference model is kept.
        head_fp32: the LM head is computed in float32.
        generated: sequences that transformers generates at a time on a GPU; 0 with vLLM.
        gather_to_generate: ZeRO-3 gathers all parameters for that.
        scoring: how the rows of a micro-batch go through the model (`basis_rl.trainer.packing.Method`).
        cpu: trained on a CPU.
        compact_head: with the LM head of `basis_rl.trainer.head`.
    """

    low: int = 0
    frozen_bytes: int = 4
    trainable_bytes: int = 4
    optimizer_states: float | None = 2.0
    rows: float = 1
    prompt: int = 0
    completion: int = 0
    checkpointing: bool = True
    attention: str = "sdpa"
    accumulation: int = 1
    reference: bool = False
    head_fp32: bool = False
    generated: int = 0
    gather_to_generate: bool = True
    scoring: Scoring = "padded"
    cpu: bool = False
    compact_head: bool = False
    budgeted: bool = False

    @property
    def micro_batch(self) -> str:
        """Its tokens."""
        most = self.rows * (self.prompt + self.completion)
        return f"at most {most:.0f}" if self.budgeted else f"{self.rows} x ({self.prompt} + {self.completion})"

    @property
    def by_segment(self) -> bool:
        """Whether attention goes through packed rows segment by segment: on a GPU, kernels take them all in 16 bits."""
        on_gpu = self.attention == "sdpa" and not self.cpu and self.compute == 2
        return self.scoring != "padded" and self.attention in ("sdpa", "eager") and not on_gpu

    @property
    def masked(self) -> bool:
        """Whether attention has a mask: of padding, or of what a segment may see of the prefixes above it."""
        if self.attention == "eager" or self.scoring == "padded":
            return self.attention in ("sdpa", "eager")
        return self.scoring == "shared" and self.by_segment

    @property
    def autocast(self) -> bool:
        """Whether matrices are cast as they are used; DeepSpeed and FSDP hold them in low precision instead."""
        return self.low > 0 and self.engine == "plain"

    @property
    def compute(self) -> int:
        """c."""
        return self.low or self.frozen_bytes

    @property
    def residual(self) -> int:
        """r: under autocast the residual stream has the precision of the embedding, float32 as a rule."""
        return self.frozen_bytes if self.autocast else self.compute


@dataclass(frozen=True)
class Part:
    """One line of the estimate: what, how many bytes, and when they are held."""

    name: str
    bytes: float
    phase: Phase = "always"


def static_parts(size: ModelSize, setting: Setting) -> list[Part]:
    """Weights, gradients, optimizer and reference model: exact, by what the engine allocates.

    - one process, DDP: all on every GPU, in the precision in which the model is loaded (bf16 is autocast: the weights
      stay as they are). DDP keeps the gradients once more, in its buckets.
    - DeepSpeed (Rajbhandari et al. 2020, arXiv:1910.02054): weights in low precision, gradients too (ZeRO-2 and 3:
      1 / W of them), and 1 / W of float32 weights (of float32 ones too: a second copy) and of Adam's moments.
    - FSDP: float32 weights, gradients and moments, 1 / W of each; while gradients are accumulated over several
      micro-batches nothing is reduced, and all of them are there in low precision.
    """
    frozen = size.parameters - size.trainable
    parts: list[Part] = []
    if setting.engine == "deepspeed":
        low = setting.low or 4
        # ZeRO-3 alone divides and offloads weights, those of the reference model as well.
        held = 1.0 if setting.stage < 3 else 0.0 if setting.offload_parameters else 1 / setting.world
        weights = reference = held * low * size.parameters
        gradients = low * size.trainable / (setting.world if setting.stage >= 2 else 1)
        share = size.trainable / (setting.world if setting.stage >= 1 else 1)
        moments = (setting.optimizer_states or 0.0) * 4 * share
        parts += [Part("weights", weights)]
        parts += [Part("gradients", 0 if setting.offload_optimizer and setting.stage >= 2 else gradients)]
        if not setting.offload_optimizer:
            parts += [Part("optimizer: float32 weights", 4 * share), Part("optimizer: moments", moments)]
    else:
        # With mixed precision FSDP keeps trained weights in float32.
        trained = 4 if setting.engine == "fsdp" and setting.low else setting.trainable_bytes
        # FSDP shards or offloads weights, gradients and moments alike; DDP shards nothing.
        share = 0.0 if setting.offload_parameters else 1 / setting.world if setting.engine == "fsdp" else 1.0
        parts += [Part("weights", share * (setting.frozen_bytes * frozen + trained * size.trainable))]
        parts += [Part("gradients", share * trained * size.trainable)]
        if setting.engine == "plain" and setting.world > 1:
            parts += [Part("gradients: DDP's buckets", trained * size.trainable)]
        if setting.engine == "fsdp" and setting.accumulation > 1:
            parts += [Part("gradients: accumulated, not sharded", setting.compute * size.trainable)]
        if setting.optimizer_states is not None and not setting.offload_optimizer:
            steps = 4 * size.trainable_tensors if setting.optimizer_states else 0
            parts += [Part("optimizer: moments", share * setting.optimizer_states * trained * size.trainable + steps)]
        reference = share * setting.frozen_bytes * size.parameters
    if setting.reference:
        parts.append(Part("reference model", reference))
    return [part for part in parts if part.bytes > 0]


def layer_activations(size: ModelSize, setting: Setting) -> float:
    """Bytes that one layer keeps for its backward pass, masks aside.

    Counted as in Korthikanti et al. 2022 (arXiv:2205.05198, Sec. 4.1), for this architecture, without dropout, with an
    attention kernel that keeps no T x T scores (theirs is 34 h + 5 heads T per token, for GPT in 16 bits with it):

    - two RMSNorms: the input and the normalised input, the first in float32: ``2 (4 h + r h)``
    - what goes into the projections: ``2 c h``; under autocast each of the five makes a copy of its own: ``5 c h``
    - attention: queries, keys, values, output, ``c (2 q + 2 k)``, or ``4 c q`` where a mask makes transformers repeat
      keys and values for all heads; the output once more, ``c q``, where segments of a packed row are joined; 4 bytes
      a head for the softmax; norms of queries and keys ``(4 + c) (q + k)``
    - MLP: both branches, the activation and the product: ``4 c f``
    """
    c = setting.compute
    r = setting.residual
    h = size.hidden
    # q, k, v, gate and up each cast their input; without casting, attention and MLP share one each.
    copies = 5 if setting.autocast and r != c else 2
    attention = c * 4 * size.query if setting.masked else c * 2 * (size.query + size.key_value)
    attention += c * size.query if setting.by_segment else 0
    if size.qk_norm:
        attention += (4 + c) * (size.query + size.key_value)
    token = 2 * (4 + r) * h + copies * c * h + attention + 4 * size.heads + 4 * c * size.intermediate
    length = setting.prompt + setting.completion
    # Eager attention keeps the softmax of all scores, in float32 and, where that is another one, in c once more.
    scores = setting.rows * size.heads * length**2 * (4 + (c if c != 4 else 0)) if setting.attention == "eager" else 0
    return setting.rows * length * token + scores


def mask_bytes(setting: Setting, layers: int) -> float:
    """The attention masks, as booleans, and as numbers in each layer that is kept.

    Padded rows have ``rows x length^2``. Packed rows have ``rows x completion x length`` where prompts are computed
    once and segments one by one, else none.
    """
    if setting.attention != "sdpa" or not setting.masked:
        return 0.0
    length = setting.prompt + setting.completion
    queries = setting.completion if setting.by_segment else length
    return float(setting.rows * queries * length * (1 + setting.compute * layers))


def head_bytes(size: ModelSize, setting: Setting) -> float:
    """The fused LM head's backward pass: no ``T x vocabulary`` logits, but a tile of them, the float32 gradients of its
    matrix (before they are added to the parameter's) and of the hidden states of the completions, and these states.

    On a CPU TRL's head scores prompts too and makes copies of its tile; ours has a smaller tile and copies a few rows
    of it, but in 16 bits it adds a product of the matrix's size at once, and under autocast it casts the matrix.
    """
    c = 4 if setting.head_fp32 else setting.compute
    tokens = setting.rows * (setting.completion + setting.prompt * setting.budgeted)
    trained = size.trainable == size.parameters
    if setting.compact_head:
        rows = min(tokens, max(LEAST_ROWS, TILE_BYTES // (size.vocabulary * c)))
        tile = size.vocabulary * (rows * c + BLOCK_COPIES * min(rows, BLOCK_ROWS) * 4)
        copies = int(trained and c == 2) + int(setting.autocast and c != setting.frozen_bytes)
        tile += copies * size.vocabulary * size.hidden * c
    elif setting.cpu:
        tokens += setting.rows * setting.prompt
        width = HEAD_TILE[1] * c + TILE_COPIES * min(size.vocabulary, HEAD_TILE[1]) * 4
        tile = min(tokens, HEAD_TILE[0]) * width
    else:
        tile = min(tokens, HEAD_TILE[0]) * HEAD_TILE[1] * c
    matrix = (4 if trained else 0) + (setting.compute if setting.engine == "deepspeed" and setting.stage == 3 else 0)
    if setting.engine == "fsdp":
        matrix += 4 if setting.low else setting.frozen_bytes
    return tile + matrix * size.vocabulary * size.hidden + (4 + setting.residual) * tokens * size.hidden


def backward_parts(size: ModelSize, setting: Setting) -> list[Part]:
    """What is there at the peak of a backward pass, beside the static parts: an estimate.

    With checkpointing each layer keeps its input, ``r h`` per token, and one layer at a time is computed again. The
    fused head and that layer are not there at the same time: the larger counts.
    """
    tokens = setting.rows * (setting.prompt + setting.completion)
    layer = layer_activations(size, setting)
    kept = 1 if setting.checkpointing else size.layers
    # While a layer is differentiated, gradients of the two branches of its MLP and of the residual stream are there.
    running = tokens * (3 * setting.compute * size.intermediate + 2 * setting.residual * size.hidden)
    final_norm = tokens * (4 + setting.residual) * size.hidden
    inputs = tokens * setting.residual * size.hidden * size.layers if setting.checkpointing else 0
    stored = inputs + (0 if setting.checkpointing else layer * size.layers) + final_norm
    working = max(head_bytes(size, setting), (layer if setting.checkpointing else 0) + running)
    parts = [Part("activations kept", stored + mask_bytes(setting, kept), "backward")]
    parts += [Part("LM head, or the layer at work", working, "backward")]
    if setting.autocast and setting.low != setting.frozen_bytes:
        lora = size.trainable < size.parameters
        copies = setting.low * size.layer_matrices * (1 / size.layers if lora and setting.checkpointing else 1)
        parts += [Part("autocast's copies of the weights", copies, "backward")]
    if setting.engine == "deepspeed" and setting.stage >= 1:
        bucket = (setting.low or 4) * REDUCE_BUCKET
        live = (setting.low or 4) * min(size.parameters, MAX_LIVE_PARAMETERS) if setting.stage == 3 else 0
        parts += [Part("DeepSpeed's bucket of gradients", bucket), Part("gathered parameters", live, "backward")]
    if setting.engine == "fsdp":
        parts += [Part("gathered parameters", setting.compute * 2 * size.layer_matrices / size.layers, "backward")]
    return [part for part in parts if part.bytes > 0]


def step_parts(size: ModelSize, setting: Setting) -> list[Part]:
    """What only the optimizer step needs: DeepSpeed turns the gradients to float32."""
    if setting.engine != "deepspeed" or not setting.low or setting.offload_optimizer:
        return []
    share = size.trainable / setting.world
    return [Part("float32 gradients", 4 * (min(share, SUB_GROUP) if setting.stage == 3 else share), "step")]


def kv_cache(size: ModelSize, sequences: int, length: int, key_bytes: int, value_bytes: int) -> float:
    """``sequences x length x layers x k`` keys and as many values."""
    return float(sequences * length * size.layers * size.key_value * (key_bytes + value_bytes))


def generation_parts(size: ModelSize, setting: Setting) -> list[Part]:
    """Generation by transformers: the KV cache of all sequences of a GPU, and with ZeRO-3 all the parameters."""
    if setting.generated == 0:
        return []
    # Under autocast rotary embeddings make the keys what the residual stream is.
    length = setting.prompt + setting.completion
    cache = kv_cache(size, setting.generated, length, setting.residual, setting.compute)
    parts = [Part("KV cache", cache, "generation")]
    if setting.engine == "deepspeed" and setting.stage == 3 and setting.gather_to_generate:
        parts.append(Part("all parameters, gathered", (setting.low or 4) * size.parameters, "generation"))
    if setting.autocast and setting.low != setting.frozen_bytes:
        # Autocast keeps its copies of what is trained until the pass ends.
        lora = size.trainable < size.parameters
        cast = size.layer_matrices / size.layers if lora else size.layer_matrices + size.vocabulary * size.hidden
        parts.append(Part("autocast's copies of the weights", setting.low * cast, "generation"))
    return parts


def memory_parts(size: ModelSize, setting: Setting) -> list[Part]:
    """All parts of one GPU; see the functions above."""
    held = static_parts(size, setting) + backward_parts(size, setting)
    return held + step_parts(size, setting) + generation_parts(size, setting)


def peak(parts: Sequence[Part]) -> float:
    """What is always held, and the phase that needs most beside it."""

    def held(phase: Phase) -> float:
        return sum(part.bytes for part in parts if part.phase == phase)

    return held("always") + max(held("backward"), held("step"), held("generation"))
