"""TRL's private names that the trainer stands on: an upgrade must fail here, not in training."""

import inspect

from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer


def source(function):
    return inspect.getsource(function)


def test_rewards_are_gathered_where_we_pick_them_up():
    text = source(GRPOTrainer._calculate_rewards)
    assert "rewards_per_func = gather(rewards_per_func)" in text
    assert "_calculate_rewards(" in source(GRPOTrainer._generate_and_score_completions)


def test_groups_are_formed_after_advantages_are_replaced():
    text = source(GRPOTrainer._prepare_inputs)
    assert text.index("_generate_and_score_completions") < text.index("shuffle_sequence_dict")


def test_output_keys():
    text = source(GRPOTrainer._generate_and_score_completions)
    for key in ('"advantages": advantages', '"completion_mask": completion_mask', 'output["tool_mask"] = tool_mask'):
        assert key in text
    assert 'self._logs["advantages"].extend' in text


def test_loss_takes_token_advantages():
    assert "if advantages.dim() == 1:" in source(GRPOTrainer._compute_loss)


def test_the_group_of_one_is_refused_in_one_place_only():
    text = source(GRPOConfig.__post_init__)
    assert text.count("self.num_generations < 2") == 1
    assert "num_generations > 1" in source(GRPOTrainer._generate_and_score_completions)


def test_the_push_comes_after_save_model():
    text = source(Trainer._save_checkpoint)
    assert text.index("self.save_model(output_dir, _internal_call=True)") < text.index("_push_from_checkpoint")


def test_all_of_transformers_pushes_go_through_what_is_overridden():
    text = inspect.getsource(Trainer)
    assert text.count("self.init_hf_repo(") == 2  # __init__ and push_to_hub
    assert text.count("self._finish_current_push()") == 2  # the end of training and push_to_hub
    assert text.count("self._push_from_checkpoint(") == 1
    assert text.count(".upload_folder(") == 3  # push_to_hub and two in _push_from_checkpoint
    assert "torch.save(self.args" in source(Trainer._save)
    assert "self.create_model_card(" in source(GRPOTrainer._save_checkpoint)


def test_the_state_is_restored_on_every_rank_and_backend():
    assert "self._load_optimizer_and_scheduler(resume_from_checkpoint)" in inspect.getsource(Trainer)
    assert "_load_optimizer_and_scheduler(self, checkpoint)" in source(GRPOTrainer._load_optimizer_and_scheduler)


def test_step_counts_micro_batches():
    assert "self._step += 1" in source(GRPOTrainer.training_step)


def test_greedy_rollouts_use_what_is_there():
    parameters = list(inspect.signature(GRPOTrainer._generate_single_turn).parameters)
    assert parameters[:5] == ["self", "prompt_ids", "images", "multimodal_fields", "num_generations"]
    assert len(inspect.signature(GRPOTrainer._tokenize_prompts).parameters) == 2
    assert "generation_config=self.generation_config" in source(GRPOTrainer._generate_single_turn)
    assert "self._pending_metrics.clear()" in source(GRPOTrainer._generate_and_score_completions)


def test_the_loss_scores_once_and_falls_back_to_the_present_policy():
    text = source(GRPOTrainer._compute_loss)
    assert text.count("self._get_per_token_logps_and_entropies(") == 1
    assert "per_token_logps.detach() if old_per_token_logps is None" in text
    assert "if self.beta != 0.0:" in text


def test_the_fused_head_can_return_the_sum_of_squares():
    from trl.trainer.utils import add_fused_lm_head

    assert '"log_sum_sq_probs"' in inspect.getdoc(add_fused_lm_head)
    assert "fused_lm_head=True" in source(GRPOTrainer._get_per_token_logps_and_entropies)


def test_hidden_states_pass_where_they_are_listened_to():
    from trl.trainer.utils import add_fused_lm_head

    text = source(add_fused_lm_head)
    assert 'backbone_attr = "base_model"' in text
    assert "backbone_outputs.last_hidden_state" in text


def test_models_are_loaded_whole_without_this_reference():
    from transformers.integrations import deepspeed

    assert "_hf_deepspeed_config_weak_ref is not None" in source(deepspeed.is_deepspeed_zero3_enabled)


def test_calls_of_tools_are_begun_before_their_answers_are_read():
    text = source(GRPOTrainer._tool_call_loop)
    assert "content = result if isinstance(result, list) else str(result)" in text
    assert text.index("str(result)") < text.index("self._get_tool_suffix_ids(tool_messages)")
    assert text.count("self._generate_single_turn(") == 1
    names = "tool_mask, completions, completion_ids, logprobs, tool_call_count, tool_failure_count, tool_images"
    assert f"return {names}" in text
    assert "parse_response(" in text
    assert "parse_response(" in source(GRPOTrainer._generate)
    parameters = list(inspect.signature(GRPOTrainer._tool_call_loop).parameters)
    assert parameters[1:5] == ["prompts", "prompt_ids", "completion_ids", "completions"]
    assert '"num_items_in_batch": num_items_in_batch' in source(GRPOTrainer._generate_and_score_completions)
