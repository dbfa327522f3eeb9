"""TRL's private names that the trainer stands on: an upgrade must fail here, not in training."""

import ast
import functools
import inspect
import re
from pathlib import Path

import pytest
import transformers.integrations.deepspeed
import transformers.modeling_utils
import transformers.utils.chat_template_utils
import trl.generation.vllm_generation
import trl.trainer.grpo_trainer
import trl.trainer.utils
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer.utils import RepeatSampler, add_fused_lm_head

PACKAGE = Path(__file__).resolve().parents[2] / "basis_rl"
BENDING = [path for room in ("trainer", "engine", "adapters") for path in sorted((PACKAGE / room).rglob("*.py"))]


class Once(str):
    """A text that occurs once; as often as `times` says in the others."""

    times = 1


class Twice(Once):
    times = 2


class Thrice(Once):
    times = 3


TRAINER, SCORED = GRPOTrainer, GRPOTrainer._generate_and_score_completions
DRAWN, TURN, LOOP = GRPOTrainer._generate, GRPOTrainer._generate_single_turn, GRPOTrainer._tool_call_loop
# By the name of what we count on, the texts that a function of TRL or transformers has, in this order.
HELD = {
    "rewards_are_gathered_where_we_pick_them_up": [
        (TRAINER._calculate_rewards, "rewards_per_func = gather(rewards_per_func)"),
        (SCORED, "_calculate_rewards("),
    ],
    "groups_are_formed_after_advantages_are_replaced": [
        (TRAINER._prepare_inputs, "_generate_and_score_completions", "shuffle_sequence_dict"),
    ],
    "output_keys": [
        (SCORED, '"completion_mask": completion_mask', '"advantages": advantages', 'output["tool_mask"] = tool_mask'),
        (SCORED, 'self._logs["advantages"].extend'),
        (SCORED, "self.args.gradient_accumulation_steps % generate_every != 0 or ("),
        (SCORED, Once("self.args.gradient_accumulation_steps")),
        (SCORED, "Unknown vLLM importance sampling level: {self.vllm_importance_sampling_mode}"),
        (SCORED, '"num_items_in_batch": num_items_in_batch'),
    ],
    "rollouts_are_cut_at_known_end_tokens": [
        (TURN, Once("self.eos_token_ids")),
        (TURN, "generation_config=self.generation_config"),
        (TRAINER.__init__, '"eos_token_id": self.eos_token_ids'),
    ],
    "tables_are_of_one_batch": [
        (TRAINER.log, '**self._logs["extra"]'),
        (TRAINER.log, "self.accelerator.is_main_process and self.log_completions"),
        (SCORED, "self._pending_extra_logs"),
    ],
    "templates_ask_this_global_for_the_date": [
        (transformers.utils.chat_template_utils, "return datetime.now().strftime(format)"),
    ],
    "loss_takes_token_advantages": [(TRAINER._compute_loss, "if advantages.dim() == 1:")],
    "the_group_of_one_is_refused_in_one_place_only": [
        (GRPOConfig.__post_init__, Once("self.num_generations < 2")),
        (SCORED, "num_generations > 1"),
    ],
    "the_push_comes_after_save_model": [
        (Trainer._save_checkpoint, "self.save_model(output_dir, _internal_call=True)", "_push_from_checkpoint"),
    ],
    "the_end_of_training_deletes_by_the_limit_only": [
        (Trainer._save_checkpoint, "self.args.save_total_limit"),
        (Trainer._finalize_training, "self.args.save_total_limit == 1:", Once("rmtree")),
    ],
    # And is there before training begins, when it is made whole.
    "the_log_of_a_checkpoint_is_that_of_the_state": [
        (Trainer._save_checkpoint, "self.state.save_to_json("),
        (Trainer._inner_training_loop, "self._init_training_state(", ".on_train_begin("),
        (Trainer._init_training_state, "TrainerState.load_from_json("),
    ],
    "step_counts_micro_batches": [
        (TRAINER.training_step, "super().training_step(model, inputs, num_items_in_batch)", "self._step += 1"),
        (TRAINER.training_step, "self._current_train_step_time += time_after - time_before"),
        (Trainer.training_step, "model.train()", "self.optimizer.train()", "self._prepare_inputs("),
    ],
    "the_loss_scores_once_and_falls_back_to_the_present_policy": [
        (TRAINER.compute_loss, "return self._compute_loss(model, inputs)"),
        (TRAINER._compute_loss, Once("self._get_per_token_logps_and_entropies(")),
        (TRAINER._compute_loss, "per_token_logps.detach() if old_per_token_logps is None"),
        (TRAINER._compute_loss, "if self.beta != 0.0:"),
    ],
    "the_fused_head_can_return_the_sum_of_squares": [
        (add_fused_lm_head, '"log_sum_sq_probs"'),
        (TRAINER._get_per_token_logps_and_entropies, "fused_lm_head=True"),
    ],
    "the_head_is_found_by_these_globals": [
        (add_fused_lm_head, "compact = _use_triton(hidden_states.device)"),
        (add_fused_lm_head, Once("_ChunkedLogProbFunction.apply(")),
    ],
    "hidden_states_pass_where_they_are_listened_to": [
        (add_fused_lm_head, 'backbone_attr = "base_model"'),
        (add_fused_lm_head, "backbone_outputs.last_hidden_state"),
    ],
    "models_are_loaded_whole_without_this_reference": [
        (transformers.integrations.deepspeed.is_deepspeed_zero3_enabled, "_hf_deepspeed_config_weak_ref is not None"),
    ],
    "the_trainer_builds_its_engine_from_this_global": [
        (TRAINER.__init__, Once("self.vllm_generation = VLLMGeneration(")),
        (TRAINER.__init__, "self._last_loaded_step = -1"),
    ],
    "the_engine_is_built_in_one_place": [
        (VLLMGeneration, Once("self._init_vllm()")),
        (VLLMGeneration, Once("self.llm = LLM(")),
        (VLLMGeneration._init_vllm, "self.llm = LLM("),
        (VLLMGeneration._init_vllm, "self.vllm_client.init_communicator(device=accelerator.device)"),
        (VLLMGeneration, 'self.llm.wake_up(tags=["kv_cache"])'),
    ],
    # In the place of these comes `merged_parameters`, whose names and values are TRL's in test_merged_weights.py.
    "weights_are_named_as_vllm_knows_them": [
        (VLLMGeneration._iter_named_params, "with self._dist.gather_params([param]):"),
        (VLLMGeneration._iter_named_params, "model.merge_adapter()", "yield", "model.unmerge_adapter()"),
        (VLLMGeneration.__init__, "self._dist = "),
    ],
    "the_rollouts_in_use_are_these": [
        (TRAINER._prepare_inputs, "generate_every = self.args.steps_per_generation * self.num_iterations"),
        (TRAINER._prepare_inputs, "self._step % generate_every == 0 or self._buffered_inputs is None"),
    ],
    "metrics_and_the_table_of_rollouts_are_these": [
        (TRAINER.log, "for key, val in self._metrics[mode].items()", "self._metrics[mode].clear()"),
    ],
    "the_norm_is_told_before_the_step": [(Trainer, "self._get_grad_norm(", "self.optimizer.step()")],
    "all_of_transformers_pushes_go_through_what_is_overridden": [
        # In __init__ and push_to_hub; at the end of training and in push_to_hub; there and twice from a checkpoint.
        (Trainer, Twice("self.init_hf_repo(")),
        (Trainer, Twice("self._finish_current_push()")),
        (Trainer, Once("self._push_from_checkpoint(")),
        (Trainer, Thrice(".upload_folder(")),
        (Trainer._save, "torch.save(self.args"),
        (TRAINER._save_checkpoint, "self.create_model_card("),
    ],
    "greedy_rollouts_use_what_is_there": [
        (
            TURN,
            "(self, prompt_ids, images, multimodal_fields, num_generations",
            "generation_config=self.generation_config",
        ),
        (TRAINER._tokenize_prompts, "(self, prompts: list):"),
        (SCORED, "self._pending_metrics.clear()"),
    ],
    # What `_generate` returns, and that prompts and rows are read again after it, from the lists it was given.
    "a_refill_changes_the_callers_prompts": [
        (
            DRAWN,
            "prompts = copy.deepcopy(prompts)",
            "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields, images, tool_images",
        ),
        (
            SCORED,
            "self._generate(prompts)",
            "self._calculate_rewards(inputs, prompts, completions, completion_ids_list)",
            "gather_object(prompts)",
        ),
        (SCORED, "self._pending_extra_logs.get(column, [None] * len(prompts))"),
    ],
    # A resume at `max_steps` would take one more; an epoch that is passed over leaves the loop by `control`.
    "the_end_is_looked_for_only_after_a_step": [
        (
            TRAINER._inner_training_loop,
            "self._init_training_state(",
            ".on_train_begin(",
            "self._run_epoch(",
            "if self.control.should_training_stop",
        ),
        (TRAINER._run_epoch, "self.state.max_steps}) higher"),
        (TRAINER._run_epoch, Once("max_steps")),
    ],
    "calls_of_tools_are_begun_before_their_answers_are_read": [
        (LOOP, "(self, prompts, prompt_ids, completion_ids, completions,"),
        (
            LOOP,
            "content = result if isinstance(result, list) else str(result)",
            "self._get_tool_suffix_ids(tool_messages)",
            Once("self._generate_single_turn("),
            "parse_response(",
            "return tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count, tool_images",
        ),
        (DRAWN, "parse_response("),
    ],
    "weights_are_sent_and_rollouts_drawn_by_these_calls": [
        (TURN, "if self.state.global_step != self._last_loaded_step:"),
        (TURN, "self.vllm_generation.sync_weights()", "self.vllm_generation.generate("),
        (VLLMGeneration.sync_weights, "update_named_params(self._weight_metadata, self._iter_named_params())"),
        (VLLMClient.update_named_params, "self, metadata:", "named_params:"),
        (VLLMClient.init_communicator, "(self, device: torch.device | str | int = 0):"),
        (VLLMClient.close_communicator, "self.communicator is not None"),
    ],
    "what_the_client_asks_passes_one_session": [
        (VLLMClient, Once("requests.get(")),
        (VLLMClient.check_server, "(self, total_timeout: float = 0.0, retry_interval: float = 2.0):", "requests.get("),
        (VLLMClient._post, "return response.json()"),
        (VLLMClient._get, "return response.json()"),
        (VLLMClient.generate, "self._post(f"),
    ],
    "an_epochs_order_is_one_permutation": [
        (RepeatSampler.__iter__, Once("torch.randperm(self.num_samples, generator=self.generator)")),
        (RepeatSampler.__iter__, Once("generator=")),
        (
            RepeatSampler.__init__,
            "data_source",
            "mini_repeat_count",
            "batch_size",
            "repeat_count: int = 1",
            "shuffle",
            "seed",
        ),
        (RepeatSampler.__init__, "self.generator.manual_seed(seed)"),
        (TRAINER._get_train_sampler, "mini_repeat_count=self.num_generations"),
        (TRAINER._get_train_sampler, "batch_size=self.args.generation_batch_size // self.num_generations"),
        (TRAINER._get_train_sampler, "repeat_count=self.num_iterations * self.args.steps_per_generation"),
        (TRAINER._get_train_sampler, "shuffle=self.shuffle_dataset", "seed=self.args.seed"),
    ],
}


@functools.cache
def source(function):
    return inspect.getsource(function)


@pytest.mark.parametrize("name", HELD)
def test_held(name):
    for function, *texts in HELD[name]:
        text = source(function)
        assert all(text.count(each) == each.times for each in texts if isinstance(each, Once))
        assert all(each in text for each in texts)
        places = [text.index(each) for each in texts]
        assert places == sorted(places)


def test_requests_are_those_of_trl():
    """The settings that `Generation._request` states are all that TRL's own call states, and its result is ours."""
    from basis_rl.engine.generation import _SETTINGS

    requests = re.findall(r"(\w+)\.(?:get|post)\(", source(VLLMClient))
    assert set(requests) <= {"session", "requests", "output", "payload", "position_logprobs"}
    text = source(VLLMGeneration.generate)
    server = text[text.index('if self.mode == "server"') : text.index('elif self.mode == "colocate"')]
    stated = set(re.findall(r'^ +"(\w+)":', server, re.MULTILINE))
    assert stated == {*_SETTINGS, "n", "min_p", "max_tokens"}
    assert set(inspect.signature(VLLMClient.generate).parameters) == {"self", "prompts", "features", *stated}
    assert "all_prompts[::num_generations]" in server
    assert "self.vllm_client.image_features(all_images[::num_generations])" in server
    assert "self._place_features(prompt_features, prompt_ids)" in server
    assert "return prompt_ids, completion_ids, logprobs, logprob_token_ids" in text
    names = list(inspect.signature(VLLMGeneration.generate).parameters)
    assert names == ["self", "prompts", "images", "num_generations", "profiler"]
    assert "_, completion_ids, logprobs, _ = self.vllm_generation.generate(" in source(
        GRPOTrainer._generate_single_turn
    )


# The page that lists them all.

PAGE = PACKAGE / "trainer" / "seams.md"
OWNERS = {
    "GRPOConfig": GRPOConfig,
    "GRPOTrainer": GRPOTrainer,
    "VLLMGeneration": VLLMGeneration,
    "VLLMClient": VLLMClient,
    "RepeatSampler": RepeatSampler,
    "grpo_trainer": trl.trainer.grpo_trainer,
    "vllm_generation": trl.generation.vllm_generation,
    "deepspeed": transformers.integrations.deepspeed,
    "trl_utils": trl.trainer.utils,
    "modeling_utils": transformers.modeling_utils,
    "modeling_mixtral": transformers.models.mixtral.modeling_mixtral,
    "masking_utils": transformers.masking_utils,
    "chat_template_utils": transformers.utils.chat_template_utils,
}
# Whose private names are common words of ours too.
READ_ONLY = {
    "GenerationMixin": transformers.GenerationMixin,
    "PreTrainedConfig": transformers.PreTrainedConfig,
}


def rows():
    return re.findall(r"^\| `(\w+)\.(\w+)` \| [^|]+ \| `([\w/.]+)` \| `(\w+)` \|$", PAGE.read_text(), re.MULTILINE)


@functools.cache
def names_of(owner):
    """What an object has: a module's or class's attributes, and those that its methods set on ``self``."""
    if inspect.ismodule(owner):
        # TRL imports some names only where vLLM is installed.
        nodes = ast.walk(ast.parse(inspect.getsource(owner)))
        imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        return set(dir(owner)) | imported
    texts = [inspect.getsource(each) for each in owner.__mro__ if each is not object and each.__module__ != "builtins"]
    return set(dir(owner)) | {name for text in texts for name in re.findall(r"self\.(\w+)", text)}


@functools.cache
def used(path):
    """Private names that a file of ours reads, writes, defines or replaces by `patch`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
            found.add(node.value)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
    return found


def test_the_page_is_whole_and_every_name_on_it_exists():
    table = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows()) == len(table) == len({(owner, name) for owner, name, *_ in rows()})
    tests = "\n".join(path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py"))
    for owner, name, file, test in rows():
        assert name in names_of((OWNERS | READ_ONLY)[owner]), f"TRL has no {owner}.{name}"
        assert name in used(PACKAGE / file), f"{file} does not use {owner}.{name}"
        assert test.removeprefix("test_") in HELD or f"def {test}(" in tests, f"there is no {test}"


def test_every_private_name_of_trl_that_we_use_is_on_the_page():
    listed = {name for _, name, *_ in rows()}
    theirs = {name for owner in OWNERS.values() if inspect.isclass(owner) for name in names_of(owner)}
    private = {name for name in theirs if name.startswith("_") and not name.startswith("__")}
    for path in BENDING:
        assert used(path) & private <= listed, path


def test_every_replaced_global_of_trl_is_on_the_page():
    listed = {(owner, name) for owner, name, *_ in rows()}
    found = set()
    for path in BENDING:
        found |= set(re.findall(r'attributes\((?:trl\.\w+\.)*(\w+), "?(\w+)"?', path.read_text()))
    owners = {"grpo_trainer", "vllm_generation", "trl_utils"}
    assert {each for each in found if each[0] in owners} <= listed
    assert {owner for owner, _ in found} >= owners
