"""Rollouts are drawn and cut as the settings say, and settings under which the loss would be of others are refused."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from trl import GRPOTrainer

from basis_rl.engine.local import VLLM_SAMPLING, Sampling
from basis_rl.run.seams import attributes
from basis_rl.trainer import BasisTrainer
from basis_rl.trainer.generation_check import _changes_vllm
from basis_rl.trainer.plan import plan_run, sampling_of
from tests.support.tiny import config, parity_reward, tiny_model, tiny_tokenizer, tiny_trainer

SERVED = {"use_vllm": True, "vllm_mode": "server"}
ALLOWED = {"allow_truncated_sampling": True}
OWN_STOP = {"generation_kwargs": {"stop_strings": ["ab"]}}


def kwargs(**given):
    return {"generation_kwargs": given}


# What is wrong, how it is right one step away, and what the message says.
MISTAKES = {
    "temperature": (kwargs(temperature=0.5), kwargs(temperature=1.0), r"the run goes by temperature \(1.0\)"),
    "JSON": ({"generation_kwargs": '{"temperature": 0.5}'}, {"generation_kwargs": "{}"}, "run goes by temperature"),
    "length": (kwargs(max_new_tokens=9), kwargs(max_new_tokens=6), "set max_completion_length itself"),
    "greedy": (kwargs(do_sample=False), kwargs(do_sample=True), "rollouts of a prompt would be the same"),
    "copies": (kwargs(num_return_sequences=2), kwargs(num_return_sequences=1), "num_generations sets the number"),
    "seed": (SERVED | kwargs(seed=3), SERVED | kwargs(seed=None), "rollouts would be copies"),
    "beams": (kwargs(num_beams=4), kwargs(num_beams=1), "which the result of a beam search is not"),
    "misspelt": (kwargs(min_new_token=2), kwargs(min_new_tokens=2) | ALLOWED, "Did you mean 'min_new_tokens'"),
    "of vLLM only": (kwargs(stop=["a"]), SERVED | kwargs(stop=["a"]), "GenerationConfig has no 'stop'"),
    "of transformers only": (SERVED | kwargs(max_time=2.0), kwargs(max_time=2.0), "Params has"),
    "no top_k": (kwargs(top_k=None), {"top_k": None}, "set top_k itself"),
    "top_p": ({"top_p": 0.9}, {"top_p": 1.0}, "top_p 0.9: rollouts would be drawn from another distribution than"),
    "top_k": ({"top_k": 50}, {"top_k": 50} | ALLOWED, "top_k 50: rollouts would"),
    "min_p": ({"min_p": 0.1}, {"min_p": 0.0}, "min_p 0.1: rollouts would"),
    "typical": (kwargs(typical_p=0.9), kwargs(typical_p=1.0), "typical_p 0.9: rollouts would"),
    "stop strings": (OWN_STOP | {"mask_truncated_completions": True}, OWN_STOP, "or name an end token"),
}  # fmt: skip


def plan(tmp_path, **settings):
    return plan_run("no/such-model", parity_reward, config(tmp_path, **settings), "rloo")


@pytest.mark.parametrize("case", MISTAKES)
def test_what_is_drawn_is_what_the_loss_is_of(case, tmp_path):
    wrong, right, words = MISTAKES[case]
    plan(tmp_path, **right)
    with pytest.raises(ValueError, match=words):
        plan(tmp_path, **wrong)


# Keys of transformers with values by which a rollout of six tokens shows what they do.
KEYS = {
    "bad_words_ids": [[5]], "begin_suppress_tokens": [5], "encoder_no_repeat_ngram_size": 1,
    "encoder_repetition_penalty": 1.5, "epsilon_cutoff": 0.01, "eta_cutoff": 0.9,
    "exponential_decay_length_penalty": (1, 2.0),
    "forced_eos_token_id": 5, "guidance_scale": 1.5, "min_length": 6, "min_new_tokens": 3, "no_repeat_ngram_size": 1,
    "sequence_bias": [[[5], 1.0]], "suppress_tokens": [5], "top_h": 0.4,
    "watermarking_config": {"bias": 2.0},
    "eos_token_id": [5, 6], "max_time": 100.0, "remove_invalid_values": True, "renormalize_logits": True,
    "stop_strings": ["ab"], "use_cache": False,
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_refused_if_tokens_are_drawn_from_another_distribution_than_the_models(name, tmp_path):
    """As `generate` tells the two, the model's logits and what it draws from."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    ids = torch.randint(10, 100, (8, 4))
    config = Sampling(6, generation_kwargs={name: KEYS[name]}).generation_config(model := tiny_model(), tokenizer)
    config.update(output_logits=True, output_scores=True, return_dict_in_generate=True)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, tokenizer=tokenizer)
    pairs = zip(found.logits, found.scores, strict=True)
    same = all(torch.allclose(logits.softmax(-1), scores.softmax(-1), atol=1e-6) for logits, scores in pairs)
    with nullcontext() if same else pytest.raises(ValueError, match=f"{name} .*: rollouts would be drawn from another"):
        plan(tmp_path, **kwargs(**{name: KEYS[name]}))
    plan(tmp_path, **kwargs(**{name: KEYS[name]}), allow_truncated_sampling=True)


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        (kwargs(presence_penalty=0.1, frequency_penalty=0.0), "presence_penalty 0.1: roll"),
        (kwargs(allowed_token_ids=[5, 6]), r"allowed_token_ids \[5, 6\]: roll"),
        (kwargs(logit_bias={5: -1.0}), "logit_bias .*: roll"),
        (kwargs(min_tokens=2), "min_tokens 2: roll"),
        ({"repetition_penalty": 1.2}, "repetition_penalty 1.2: roll"),
        ({"vllm_structured_outputs_regex": "a+"}, r"structured_outputs a\+: roll"),
        (kwargs(stop=["a"], stop_token_ids=[5], ignore_eos=True, bad_words=[], presence_penalty=0.0), ""),
    ],
)
def test_a_server_is_asked_for_the_policys_own_distribution(given, refused, tmp_path):
    with pytest.raises(ValueError, match=refused) if refused else nullcontext():
        plan(tmp_path, **SERVED, **given)
    plan(tmp_path, **SERVED, **given, **ALLOWED)


@pytest.mark.parametrize("off", [None, -1, 0])
def test_top_k_has_three_spellings_of_none(off, tmp_path):
    assert sampling_of(plan(tmp_path, top_k=off).args).top_k == 0


@pytest.mark.vllm
def test_the_fields_of_vllm_are_those():
    from vllm import SamplingParams

    # What is left out of a request is neutral.
    assert not any(_changes_vllm(name, getattr(SamplingParams(), name)) for name in VLLM_SAMPLING)
    assert set(VLLM_SAMPLING) == {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}


class Rollouts(BasisTrainer):
    """Keeps the rollouts of the last batch, and what `generate` made of them before anything was cut."""

    def _generate_single_turn(self, *args, **kwargs):
        result = super()._generate_single_turn(*args, **kwargs)
        self.drawn = result[0]
        return result


LETTERS = tiny_tokenizer().convert_tokens_to_ids(list("abcdef"))
ENDS = {
    "eos_token_id": {"eos_token_id": LETTERS[:2]},
    "one eos_token_id": {"eos_token_id": LETTERS[0]},
    "stop_strings": {"stop_strings": ["ab", "c"]},
    "stop_strings, padded by the end token": {"stop_strings": "a"},
    "max_time": {"max_time": 0.01},
}


@pytest.mark.parametrize("case", ENDS)
def test_padding_is_not_trained_on(case, tmp_path):
    """Nothing follows the first end, wherever that is."""
    tokenizer = tiny_tokenizer()
    if "padded by" in case:
        tokenizer.pad_token = tokenizer.eos_token
    given, allowed = ENDS[case], set(LETTERS)
    few = {"suppress_tokens": [i for i in range(len(tokenizer)) if i not in allowed]}
    own = {"processing_class": tokenizer, "generation_kwargs": {**few, **given}, **ALLOWED}
    trainer = tiny_trainer(tmp_path, cls=Rollouts, max_steps=1, max_completion_length=24, **own)
    trainer.train()
    ends = given.get("eos_token_id", [])
    strings = given.get("stop_strings", [])
    assert len({len(ids) for ids in trainer.drawn}) > 1 or case == "max_time"
    for ids in trainer.drawn:
        assert set(ids) <= allowed, "only what was sampled"
        before = ids[:-1]
        assert not set(before) & {*([ends] if isinstance(ends, int) else ends)}
        for string in [strings] if isinstance(strings, str) else strings:
            assert string not in tokenizer.decode(before)
        if len(ids) < 24 and strings:
            assert tokenizer.decode(ids).endswith(tuple(strings))
    ended = [ids[-1] in {*([ends] if isinstance(ends, int) else ends)} for ids in trainer.drawn]
    cut = trainer.state.log_history[0]["completions/clipped_ratio"]
    assert cut == pytest.approx(1 - sum(ended) / len(ended))


class Casts(TorchDispatchMode):
    """Counts the copies of one tensor in another precision."""

    def __init__(self, tensor):
        super().__init__()
        self.pointer, self.count = tensor.data_ptr(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() == self.pointer:
            self.count += 1
        return func(*args, **(kwargs or {}))


def test_autocast_copies_the_weights_once_for_a_rollout_and_follows_their_updates(tmp_path):
    class Counting(Rollouts):
        def _generate_single_turn(self, *args, **kwargs):
            with Casts(self.model.model.layers[0].mlp.up_proj.weight) as casts:
                result = super()._generate_single_turn(*args, **kwargs)
            counts.append(casts.count)
            # The policy's own random numbers do not begin with seeds that are set here.
            with attributes(self._numbers, _lent=None):
                torch.manual_seed(1)
                again.append(GRPOTrainer._generate_single_turn(self, *args, **kwargs)[0])
                torch.manual_seed(1)
                ours.append(super()._generate_single_turn(*args, **kwargs)[0])
            return result

    counts, again, ours = [], [], []
    tiny_trainer(tmp_path, cls=Counting, max_steps=3, steps_per_generation=1, bf16=True, learning_rate=0.1).train()
    assert counts == [1, 1, 1]
    assert ours == again
    assert len({str(each) for each in ours}) == 3


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_rollout_has_a_token(tokens, tmp_path):
    def roll_out(prompts, trainer):
        rows = [[5, 6]] * (len(prompts) - 1) + [[5] * tokens]
        return {"prompt_ids": [[7]] * len(prompts), "completion_ids": rows, "logprobs": [[0.0] * len(r) for r in rows]}

    trainer = tiny_trainer(tmp_path, rollout_func=roll_out, max_steps=1)
    with nullcontext() if tokens else pytest.raises(RuntimeError, match="1 of 16 rollouts without a token"):
        trainer.train()
