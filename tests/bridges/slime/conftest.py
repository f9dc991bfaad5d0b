"""A user's file of hooks, written for slime: its imports, names and signatures."""

from pathlib import Path

import pytest

HOOKS = '''
import asyncio
import os
import sys
import time

import numpy as np

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState
from slime.rollout.sglang_rollout import generate as one_turn
from slime.utils.async_utils import run
from slime.utils.http_utils import post
from slime.utils.types import Sample

async def two_turns(args, sample, sampling_params, evaluation=False):
    """Asks, appends what a tool says, asks again: ids in, ids out."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids, mask, logprobs, text = [], [], [], ""
    for turn in range(2):
        asked = {"input_ids": prompt_ids + ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, asked)
        new = output["meta_info"]["output_token_logprobs"]
        ids += [item[1] for item in new]
        logprobs += [item[0] for item in new]
        mask += [1] * len(new)
        text += output["text"]
        if turn == 0:
            told = state.tokenizer.encode("<|tool|>ok<|end|><|assistant|>", add_special_tokens=False)
            ids += told
            mask += [0] * len(told)
            logprobs += [0.0] * len(told)
    sample.tokens, sample.response_length = prompt_ids + ids, len(ids)
    sample.response, sample.loss_mask, sample.rollout_log_probs = text, mask, logprobs
    sample.weight_versions.append(output["meta_info"]["weight_version"])
    sample.metadata["evaluation"] = evaluation
    sample.status = Sample.Status.COMPLETED
    return sample

async def fan_out(args, sample, sampling_params):
    first = await one_turn(args, sample, sampling_params)
    other = Sample(index=sample.index, group_index=sample.group_index, prompt=sample.prompt)
    second = await one_turn(args, other, sampling_params)
    second.reward = 0.25
    return [first, second]

async def makes_up(args, sample, sampling_params):
    sample = await one_turn(args, sample, sampling_params)
    sample.tokens[-1] += 1
    return sample

async def gives_up(args, sample, sampling_params):
    sample = await one_turn(args, sample, sampling_params)
    sample.status = Sample.Status.ABORTED
    return sample

def spread(args, samples, **kwargs):
    rewards = [sample.reward for sample in samples]
    return DynamicFilterOutput(keep=bool(np.std(rewards) > 1e-6), reason=f"zero_std_{rewards[0]}")

def mark_wrong(args, groups):
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.reward == 0.0

def show(args, all_groups, data_source):
    assert [sample.group_index for sample in all_groups[0]] == [5, 5, 5, 5]
    data_source(1)

def shout(args, sample, *, rollout_id=None, evaluation=False):
    sample.response = sample.response.upper()
    sample.metadata["hooked"] = True

async def mask_first(args, sample, *, rollout_id=None, evaluation=False):
    sample.loss_mask = [0] + [1] * (sample.response_length - 1)
    return sample

def looks(args, sample):
    assert sample.status is Sample.Status.COMPLETED

def removes(args, sample):
    sample.remove_sample = sample.response.startswith("3")

def wants_both(args, sample, rollout_id, evaluation):
    assert rollout_id is None and evaluation is False

def whole_rollout(args, rollout_id, data_source, evaluation=False):
    async def work():
        assert args.rollout_batch_size == 1
        groups = []
        while found := data_source.get_samples(4):
            params = {"max_new_tokens": args.rollout_max_response_len}
            groups += [list(await asyncio.gather(*(one_turn(args, one, dict(params)) for one in group))) for group in found]
        for group in groups:
            for sample in group:
                sample.reward = float(sample.index % 2)
        groups[0][2].remove_sample = True
        return RolloutFnTrainOutput(samples=[groups[0][:3]], metrics={})

    return run(work())

def normalized(args, samples):
    rewards = np.array([sample.reward for sample in samples])
    groups = np.array([sample.group_index for sample in samples])
    done = rewards.copy()
    for group in set(groups):
        of = rewards[groups == group]
        done[groups == group] = (of - of.mean()) / (of.std(ddof=1) + 1e-6)
    return rewards.tolist(), done.tolist()

def advantages(args, rollout_data):
    import torch

    rollout_data["advantages"] = [
        torch.full((length,), reward * args.gamma)
        for length, reward in zip(rollout_data["response_lengths"], rollout_data["rewards"])
    ]
    rollout_data["returns"] = rollout_data["advantages"]

def truncated(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs):
    import torch

    rho = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    weights = rho.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weights, loss_masks, {"tis": rho}

def masks_first(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths):
    masks = [mask.clone() for mask in loss_masks]
    for mask in masks:
        mask[0] = 0
    return pg_loss, masks, {}
'''
SMALL_HOOKS = {
    "async def text_back(args, sample, sampling_params)": '"a text"',
    "async def rm(args, sample, **kwargs)": 'float(sample.response.startswith(str(sample.label))) + kwargs.get("bonus", 0.0)',
    "async def table_rm(args, sample, **kwargs)": '{"score": float(sample.response.startswith("2")), "pred": sample.response}',
    "async def ranks(args, samples, **kwargs)": "[rank / args.n_samples_per_prompt for rank in range(len(samples))]",
    "async def nan_rm(args, sample, **kwargs)": 'float("nan")',
    "async def text_rm(args, sample, **kwargs)": '"1.0"',
    "async def short_group(args, samples, **kwargs)": "[0.0]",
    "def plain_rm(args, sample, **kwargs)": "1.0",
    "async def one_argument(args)": "1.0",
    "async def exits(args, sample, **kwargs)": "sys.exit(3)",
    "async def dies(args, sample, **kwargs)": "os._exit(7)",
    "async def hangs(args, sample, **kwargs)": "time.sleep(600)",
    "async def asks_too_much(args, sample, **kwargs)": "args.tensor_model_parallel_size",
    "def forgets(args, samples, **kwargs)": "None",
    "async def wants_evaluation(args, sample, sampling_params, evaluation)": "await one_turn(args, sample, sampling_params)",
    "def two_numbers(args, samples)": "1.0, 0.0",
    "def reads_text(args, samples)": "[sample.response for sample in samples], [0.0] * len(samples)",
    "def no_advantages(args, rollout_data)": "None",
    "def by_name(*, args, pg_loss, loss_masks, **others)": 'pg_loss, loss_masks, {"ones": loss_masks}',
    "def loss_alone(args, *, pg_loss, **others)": "pg_loss",
    "def one_mask(args, *, pg_loss, **others)": "pg_loss, [pg_loss[:1].detach()], {}",
}
"""Functions that only return a value."""


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file; the working directory is its folder."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "hooks.py"
    file.write_text(HOOKS + "".join(f"\n{head}:\n    return {value}\n" for head, value in SMALL_HOOKS.items()))
    return file
